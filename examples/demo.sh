#!/usr/bin/env bash
# Builds the command-line tool and compares what several methods keep of a long document, on the shipped model.
#
#   examples/demo.sh [FLAG ...]            more flags for `tessera eval`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/packages.sh

eval_flags=(--model examples/model
            --methods full,streaming_llm,h2o,snapkv,pyramidkv,ada_snapkv,hsa,rocketkv,rocketkv_mt,exact_topk
            --budgets 64,256 --context 2048
            --families single,multi_key,conversation --count 6)

need "${build_packages[@]}" "${example_packages[@]}"
echo "Building the tool (a few minutes the first time) ..."
cmake --preset release -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCHMARKS=OFF -DTESSERA_CUDA=OFF >/dev/null
cmake --build build/release --target tessera --parallel "$(nproc)"

echo "+ build/release/bin/tessera eval ${eval_flags[*]} $*"
exec build/release/bin/tessera eval "${eval_flags[@]}" "$@"
