#!/usr/bin/env bash
# Makes virtual environments, installs what is needed, builds, and runs the tests: all of them with the newest transformers that is
# known, then those that ask transformers with the oldest. On a CPU; on a GPU machine too, with the PyTorch that is there.
#
#   examples/integrations/pytorch/test.sh [PYTEST FLAG ...]
#   test.sh --whole                               50 prompts and 60 conversations where a few are the default
#   TRANSFORMERS='transformers==5.17.*' test.sh   all tests with this version alone
#   VENV=FOLDER test.sh                           where the environment is made, and FOLDER-oldest; used again if it is there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
root=$(cd ../../.. && pwd)
source "$root/tests/packages.sh"
venv=${VENV:-$root/build/pytorch_venv}
tool=$root/build/pytorch_tool
newest=${TRANSFORMERS:-transformers==5.24.*} oldest='transformers==4.57.*'
asks_transformers=(tests/test_{architectures,drafts,facts,full,generate,methods,refusals,rope,use}.py tests/models)

need "${build_packages[@]}" "${example_packages[@]}"
if [ ! -e "$venv/bin/activate" ]; then
  # What the machine has stays in use: its torch fits its GPU.
  python3 -m venv --system-site-packages "$venv"
fi
source "$venv/bin/activate"
echo "Installing ..."
pip install --quiet 'torch>=2.6' "$newest" pytest pytest-xdist sentencepiece protobuf ninja matplotlib
if [ -z "${TRANSFORMERS:-}" ] && [ ! -e "$venv-oldest/bin/activate" ]; then
  # A transformers of its own before everything that the first environment has.
  python3 -m venv "$venv-oldest"
  packages=$("$venv-oldest/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  python -c 'import site, sysconfig; print(sysconfig.get_path("purelib"), *site.getsitepackages(), sep="\n")' >"$packages/first.pth"
  "$venv-oldest/bin/pip" install --quiet "$oldest"
fi

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
if [ -z "${TRANSFORMERS:-}" ]; then
  echo "With $oldest ..."
  "$venv-oldest/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist worksteal "${asks_transformers[@]}" "$@"
fi
echo "Took $SECONDS s."
