#!/usr/bin/env bash
# Runs the command-line tool in thousands of ways in which it should not be run. Not part of the tests; a sample of 200 is.
#
#   tests/hostile/run.sh [RUNS [SEED]]     10000 runs unless given; another seed makes other runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/packages.sh

need "${build_packages[@]}" "${example_packages[@]}" python3
cmake --preset release -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCHMARKS=OFF -DTESSERA_CUDA=OFF >/dev/null
cmake --build build/release --target tessera --parallel "$(nproc)"
exec python3 tests/hostile/hostile.py build/release/bin/tessera examples "${1:-10000}" "${2:-1}"
