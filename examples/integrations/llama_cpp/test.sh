#!/usr/bin/env bash
# Gets and builds llama.cpp, builds this integration and runs its tests: about ten minutes of two cores. No model is needed.
#
#   test.sh [-DOPTION=VALUE ...]     the options go to CMake; build/llama_cpp is where it is built
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source tests/packages.sh
need "${build_packages[@]}" "${test_packages[@]}" libeigen3-dev python3-venv || { echo "The packages that the build needs are not installed." >&2; exit 1; }
here=examples/integrations/llama_cpp
while IFS='=' read -r name value; do declare "$name=$value"; done < <("$here/get_llama_cpp.sh" | tail -n 2)
cmake -G Ninja -S "$here" -B build/llama_cpp "-DLLAMA_CPP=$LLAMA_CPP" "-DLLAMA_CPP_BUILD=$LLAMA_CPP_BUILD" -DTESSERA_LLAMA_PLUGIN=ON "$@"
cmake --build build/llama_cpp --parallel "$(nproc)"
ctest --test-dir build/llama_cpp --output-on-failure --no-tests=error
