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
echo "Building the tool for the CPU and the shipped model's head dim of 64 (a minute or two the first time) ..."
cmake --preset release -B build/demo -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCHMARKS=OFF -DTESSERA_CUDA=OFF \
      -DTESSERA_TOOL_HEAD_DIMS=64 >/dev/null
cmake --build build/demo --target tessera --parallel "$(nproc)"

echo "+ build/demo/bin/tessera eval ${eval_flags[*]} $*"
exec build/demo/bin/tessera eval "${eval_flags[@]}" "$@"
