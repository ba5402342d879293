#!/usr/bin/env bash
# Builds every tests/fuzz/fuzz_*.cpp with clang's libFuzzer and runs each for the given time, as many at once as there
# are cores. Inputs to begin with: tests/fuzz/corpus/NAME/. What is found stays in build/fuzz/NAME/.
#
#   tests/fuzz.sh [SECONDS]                300 unless given
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/packages.sh

seconds=${1:-300}
folder=$PWD/build/fuzz

find_clang
need "${build_packages[@]}" "${example_packages[@]}" "clang-$clang_version" "libclang-rt-$clang_version-dev"

# The tool's layers are of one head dim, that of the first inputs: others are refused.
cmake --preset fuzz -DCMAKE_CXX_COMPILER="clang++-$clang_version" -DTESSERA_TOOL_HEAD_DIMS=64
programs=()
for file in tests/fuzz/fuzz_*.cpp; do
  [ -e "$file" ] && programs+=("$(basename "$file" .cpp)")
done
[ ${#programs[@]} -gt 0 ] || { echo "There is no tests/fuzz/fuzz_*.cpp."; exit 1; }
cmake --build "$folder" --target "${programs[@]}"

fuzz_one() {  # PROGRAM SECONDS FOLDER: one fuzzer; its folder keeps the inputs that it found worth keeping
  local seeds=tests/fuzz/corpus/$1 found=$3/$1
  mkdir -p "$found/corpus"
  [ -d "$seeds" ] || seeds=
  if "$3/bin/$1" -max_total_time="$2" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
      -artifact_prefix="$found/" "$found/corpus" $seeds >"$found/log.txt" 2>&1; then
    echo "$1: no failure in $(sed -n 's/^stat::number_of_executed_units: *//p' "$found/log.txt") runs"
  else
    tail -n 40 "$found/log.txt"
    echo "$1: FAILED, see $found"
    return 1
  fi
}
export -f fuzz_one

outcome=0
printf '%s\n' "${programs[@]}" |
  xargs -P "$(nproc)" -I {} bash -c 'fuzz_one "$@"' _ {} "$seconds" "$folder" | tee "$folder/results.txt" || outcome=1
failed=$(grep -c ': FAILED' "$folder/results.txt" || true)
echo "$((${#programs[@]} - failed)) passed, $failed failed"
exit $outcome
