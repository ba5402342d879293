#!/usr/bin/env bash
# Installs what is missing (Debian, Ubuntu), builds everything and runs every test. The last line is the result.
#
#   tests/run.sh [-DOPTION=VALUE ...]      the options go to CMake
#   PRESET=debug tests/run.sh              another preset of CMakePresets.json
#
# One method's tests, after a first build (every case is tagged with its method's name):
#   cmake --build build/release --target test_methods && build/release/bin/test_methods '[snapkv]'
#   cmake --build build/release --target test_gpu_methods && build/release/bin/test_gpu_methods '[snapkv]'      where there is a GPU
# A new header in include/tessera/methods needs no more than that: CMake makes its tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/packages.sh

preset=${PRESET:-release}
folder=build/$preset
jobs=$(nproc)

# A failure before any test ran is one failure, so that the last line never claims more than was seen.
give_up() {
  echo "$1" >&2
  echo "0 passed, 1 failed"
  exit 1
}

need "${build_packages[@]}" "${example_packages[@]}" "${test_packages[@]}" "${benchmark_packages[@]}" "${documentation_packages[@]}" \
  || give_up "The packages that the build needs are not installed."
# For the check `format`, which says that it is skipped where this does not work.
format=$folder/format
[ -x "$format/bin/clang-format" ] \
  || { python3 -m venv "$format" && "$format/bin/pip" install -q "clang-format==$(python3 cmake/checks/format.py --version)"; } >/dev/null 2>&1 \
  || echo "clang-format could not be installed: the format is not checked"
cmake --preset "$preset" "$@" || give_up "CMake could not configure the build."
cmake --build "$folder" --parallel "$jobs" -- -k 0 || give_up "The build failed."

results=$PWD/$folder/test_results.xml
rm -f "$results"
ctest --test-dir "$folder" --parallel "$jobs" --output-on-failure --no-tests=error --output-junit "$results"
status=$?

# <testsuite ... tests="12" failures="0" disabled="0" skipped="0" ...>
count() { sed -n "/<testsuite/,/>/s/.*\b$1=\"\([0-9]*\)\".*/\1/p" "$results" | head -n 1; }
[ -s "$results" ] || give_up "ctest wrote no results."
total=$(count tests)
skipped=$(count skipped)
not_passed=$(($(count failures) + $(count disabled)))
[ "$status" -ne 0 ] && [ "$not_passed" -eq 0 ] && not_passed=1
echo "Took $SECONDS s."
# Skipped: the GPU tests, where there is no GPU, and the site where there is no Doxygen.
echo "$((total - not_passed - skipped)) passed, $not_passed failed, $skipped skipped"
[ "$not_passed" -eq 0 ]
