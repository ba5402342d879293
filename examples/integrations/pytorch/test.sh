#!/usr/bin/env bash
# Makes a virtual environment, installs what is needed, builds, and runs the tests. On a CPU; on a GPU machine too, with
# the PyTorch and transformers that are there.
#
#   examples/integrations/pytorch/test.sh [PYTEST FLAG ...]
#   test.sh --whole                               50 prompts and 60 conversations where a few are the default
#   TRANSFORMERS='transformers==5.*' test.sh      another version than 4.57
#   VENV=FOLDER test.sh                           where the environment is made; used again if it is there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
root=$(cd ../../.. && pwd)
source "$root/tests/packages.sh"
venv=${VENV:-$root/build/pytorch_venv}
tool=$root/build/pytorch_tool

need "${build_packages[@]}" "${example_packages[@]}"
if [ ! -e "$venv/bin/activate" ]; then
  # What the machine has stays in use: its torch fits its GPU.
  python3 -m venv --system-site-packages "$venv"
fi
source "$venv/bin/activate"
echo "Installing ..."
pip install --quiet 'torch>=2.6' "${TRANSFORMERS:-transformers==4.57.*}" pytest pytest-xdist sentencepiece protobuf ninja matplotlib

echo "Building the tool, whose answers the caches must give ..."
(cd "$root" && cmake --preset release -B "$tool" -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCHMARKS=OFF \
  -DTESSERA_CUDA=OFF -DTESSERA_TOOL_HEAD_DIMS=64 >/dev/null)
cmake --build "$tool" --target tessera --parallel "$(nproc)" | tail -n 1

# PyTorch's threads and the cache's take turns: those that wait must not spin.
export TESSERA=$tool/bin/tessera OMP_WAIT_POLICY=passive PYTHONPATH=$here
echo "Building the operators and the methods for the shipped model ..."
python - <<'PYTHON'
import torch
from tessera_torch import build, methods
build.operators()
build.build_all([(method, torch.float32, 64) for method in methods()])
PYTHON
python -m pytest -q -p no:cacheprovider -n 2 --dist worksteal tests "$@"  # most tests keep one core busy
echo "Took $SECONDS s."
