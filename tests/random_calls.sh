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
failed=0
"build/$preset/bin/test_methods" 'random calls*' || failed=$((failed + 1))
"build/$preset/bin/test_backend_cpu" 'random calls*' || failed=$((failed + 1))
echo "$calls calls: $((2 - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
