#!/usr/bin/env bash
# Runs the test suite under the address and undefined-behaviour sanitizers, then under the thread sanitizer.
#
#   tests/sanitize.sh [asan|tsan]          both, unless one is named
#
# Built with clang: g++ 12 takes many times as long over sanitized vector code.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/packages.sh

find_clang
need "clang-$clang_version" "libclang-rt-$clang_version-dev"
# The tool for the head dim of the model that its tests read, as in CI.
options=("-DCMAKE_CXX_COMPILER=clang++-$clang_version" -DTESSERA_TOOL_HEAD_DIMS=64)
export TESSERA_TEST_SCALE=${TESSERA_TEST_SCALE:-0.05}  # the random tests draw this fraction of their cases

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

# The thread sanitizer of older compilers cannot live with much address randomisation; where a process may turn it off
# for itself, it is turned off.
fixed_addresses=()
if setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
  fixed_addresses=(setarch "$(uname -m)" --addr-no-randomize)
fi

failed=0
for preset in ${1:-asan tsan}; do
  echo "== $preset"
  if [ "$preset" = tsan ]; then
    PRESET=$preset "${fixed_addresses[@]}" tests/run.sh "${options[@]}" || failed=1
  else
    PRESET=$preset tests/run.sh "${options[@]}" || failed=1
  fi
done
exit $failed
