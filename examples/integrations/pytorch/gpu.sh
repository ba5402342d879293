#!/usr/bin/env bash
# What needs a GPU: the tests for CUDA, then benchmark.py. For a machine without a network that has PyTorch, nvcc, g++ and
# ninja; the rest comes from bring_along.sh. Leaves gpu.log and benchmark.json, which are written as it goes.
#
#   gpu.sh --wheels FOLDER --out FOLDER --limit SECONDS [--only tests|benchmark] [BENCHMARK FLAG ...]
set -euo pipefail
only=
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$(realpath "$2"); shift 2 ;;
    --out) mkdir -p "$2"; out=$(realpath "$2"); shift 2 ;;
    --limit) limit=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    *) break ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
: "${wheels:?pass --wheels FOLDER}" "${limit:?pass --limit SECONDS}"
exec > >(tee "${out:?pass --out FOLDER}/gpu.log") 2>&1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
left() { echo $((limit > SECONDS ? limit - SECONDS : 1)); }

"$here/bring_along.sh" --unpack "$wheels" "$work/site"
export PYTHONPATH=$work/site:$here PYTHONUNBUFFERED=1 TESSERA_TORCH_CACHE=${TESSERA_TORCH_CACHE:-$work/built}
export OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 USE_TF=0 USE_FLAX=0
export PATH=$PATH:/usr/local/cuda/bin
# A compiler that the machine names may link its own libstdc++ in: what it makes cannot be loaded beside torch's.
unset CC CXX CUDAHOSTCXX
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv,noheader || true
nvcc --version | tail -n 2

echo "--- building ($SECONDS s)"
ONLY=$only python3 - <<'PYTHON'
import os, sys, threading, tessera_torch, torch, transformers
sys.path.insert(0, "tests")
from tessera_torch import build
print("Python", sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__)
wanted = []
if os.environ["ONLY"] != "tests":
    wanted += [(name, torch.bfloat16, 128, "cuda") for name in ("rocketkv", "ada_snapkv", "snapkv", "full")]
if os.environ["ONLY"] != "benchmark":
    wanted += [(name, torch.bfloat16, 64, "cuda") for name in reversed(tessera_torch.methods())]
    wanted += [("full", torch.bfloat16, dim, "cuda") for dim in (256, 96, 128)]
    wanted += [(name, torch.bfloat16, 64, "cuda", "pages") for name in ("ada_snapkv", "snapkv")]
    wanted += [(name, dtype, 64) for name in tessera_torch.methods() for dtype in (torch.bfloat16, torch.float32)]

def build_recipes():
    try:
        build.build_all(list(dict.fromkeys(wanted)))
    except ValueError as problem:  # all others are built; what runs on the host alone is skipped by the tests
        print(problem)

recipes = threading.Thread(target=build_recipes)
recipes.start()
build.operators()
recipes.join()
PYTHON

# Only the plugins that are named: others of the machine may not fit the pytest that was brought along.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
tests() { timeout -k 5 "$(left)" python3 -m pytest -q -p no:cacheprovider -p pytest_timeout --timeout 120 --tb short "$@" || true; }
if [ "$only" != benchmark ]; then
  echo "--- tests of pages, memory, errors and captured steps ($SECONDS s)"
  tests tests/test_pages.py -k cuda
  tests tests/test_cuda.py -k 'not answers' --durations 5
  echo "--- tests against the CPU and eager attention ($SECONDS s)"
  OMP_NUM_THREADS=2 tests -p xdist.plugin -n 8 -rP tests/test_cuda.py tests/test_architectures.py -k 'answers or cuda and logits'
fi
if [ "$only" != tests ]; then
  echo "--- benchmark ($SECONDS s)"
  # A cell that has begun may take a minute.
  timeout -k 5 "$(left)" python3 benchmark.py --out "$out/benchmark.json" --limit $(($(left) - 75)) "$@" || true
fi
echo "--- done ($SECONDS s)"
