#!/usr/bin/env bash
# Calls the caches and the operations in random order with random arguments, valid and not, under the address and
# undefined-behaviour sanitizers. Not part of the tests; a sample is.
#
#   tests/random_calls.sh [CALLS]          1000000 unless given; half go to the caches, half to the operations
#   PRESET=release tests/random_calls.sh   without the sanitizers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/packages.sh

preset=${PRESET:-asan}
calls=${1:-1000000}
options=(-DTESSERA_CUDA=OFF)
need "${build_packages[@]}" "${example_packages[@]}" "${test_packages[@]}"
if [ "$preset" = asan ]; then
  find_clang
  need "clang-$clang_version" "libclang-rt-$clang_version-dev"
  options+=(-DCMAKE_CXX_COMPILER="clang++-$clang_version")
fi
cmake --preset "$preset" "${options[@]}" >/dev/null
cmake --build "build/$preset" --target test_methods test_backend_cpu --parallel "$(nproc)"
export TESSERA_RANDOM_CALLS=$((calls / 2))
parts=$(nproc)
failed=0 running=()
for program in test_methods test_backend_cpu; do
  for ((part = 0; part < parts; ++part)); do
    TESSERA_RANDOM_PART=$part/$parts "build/$preset/bin/$program" 'random calls*' >"build/$preset/$program.$part.log" 2>&1 &
    running+=("$!:$program.$part")
  done
  for one in "${running[@]}"; do
    wait "${one%%:*}" || { failed=$((failed + 1)); cat "build/$preset/${one#*:}.log"; }
  done
  running=()
done
echo "$calls calls in $((2 * parts)) runs: $((2 * parts - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
