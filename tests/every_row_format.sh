#!/usr/bin/env bash
# Every method over fp8, int8, int4 and int2 rows in pages, on the CPU: builds tests/methods/test_encoded_rows.cpp once for
# each format, and runs it. The test command goes over some methods alone. The last line is the result.
#
#   tests/every_row_format.sh [FORMAT ...]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/packages.sh
need "${build_packages[@]}" "${test_packages[@]}" || { echo "The packages that the build needs are not installed." >&2; exit 1; }

formats=("$@")
[ ${#formats[@]} -gt 0 ] || formats=(fp8 int8 int4 int2)
folder=build/every_row_format
mkdir -p "$folder"
failed=0
for format in "${formats[@]}"; do
  echo "$format: builds"
  cmake --preset release -B "$folder" -DTESSERA_BUILD_BENCHMARKS=OFF -DTESSERA_UNOPTIMISED_TESTS=ON \
    "-DTESSERA_ROWS_OF_EVERY_METHOD=${format}_rows" >"$folder/build.log" 2>&1 &&
    cmake --build "$folder" --parallel "$(nproc)" --target test_methods >>"$folder/build.log" 2>&1 &&
    "$folder/bin/test_methods" "every method over encoded rows in pages does as over the decoded values" ||
    { echo "$format: failed; the build's output is in $folder/build.log"; failed=$((failed + 1)); }
done
echo "$((${#formats[@]} - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
