#!/usr/bin/env bash
# What needs a GPU: the tests for CUDA, then benchmark.py. For a machine without a network that has PyTorch, nvcc, g++ and
# ninja; the rest comes from bring_along.sh. Leaves gpu.log and benchmark.json, which are written as it goes.
#
#   gpu.sh --out FOLDER --limit SECONDS [--wheels FOLDER] [--only tests|benchmark] [--methods A,B,...] [--quick] [BENCHMARK FLAG ...]
#
# --wheels: else the transformers and pytest that are there.
# --methods: of the tests that run for every method, only these.   --quick: nothing is compared with the CPU and other models.
set -euo pipefail
only= methods= quick=no wheels=
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$(realpath "$2"); shift 2 ;;
    --out) mkdir -p "$2"; out=$(realpath "$2"); shift 2 ;;
    --limit) limit=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    --methods) methods=$2; shift 2 ;;
    --quick) quick=yes; shift ;;
    *) break ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
: "${limit:?pass --limit SECONDS}"
exec > >(tee "${out:?pass --out FOLDER}/gpu.log") 2>&1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
left() { echo $((limit > SECONDS ? limit - SECONDS : 1)); }

[ -z "$wheels" ] || "$here/bring_along.sh" --unpack "$wheels" "$work/site"
export PYTHONPATH=$work/site:$here:${PYTHONPATH:-} PYTHONUNBUFFERED=1 TESSERA_TORCH_CACHE=${TESSERA_TORCH_CACHE:-$work/built}
export OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 USE_TF=0 USE_FLAX=0
export PATH=$PATH:/usr/local/cuda/bin
# A compiler that the machine names may link its own libstdc++ in: what it makes cannot be loaded beside torch's.
unset CC CXX CUDAHOSTCXX
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv,noheader || true
nvcc --version | tail -n 2

# Compiles what is named, as many at once as there are cores, and says so as it goes.
#   operators | METHOD:DTYPE:DIM:DEVICE:KIND, as tessera_torch.build.library takes them
build() {
  timeout "$(left)" python3 - "$@" <<'PYTHON'
import concurrent.futures, os, sys, time, torch, transformers
from tessera_torch import build
print("Python", sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__)

def one(name):
    begin = time.monotonic()
    try:
        if name == "operators":
            build.operators()
        else:
            method, dtype, dim, *rest = name.split(":")
            build.library(method, getattr(torch, dtype), int(dim), *rest)
    except ValueError as problem:  # what runs on the host alone is skipped by the tests
        name += f": {problem}"
    print(f"built {name} ({time.monotonic() - begin:.0f} s)", flush=True)

with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    list(pool.map(one, sys.argv[1:]))
PYTHON
}

methods=${methods:-$(python3 -c 'from tessera_torch import methods; print(",".join(methods()))')}
caches=()
if [ "$only" != tests ]; then
  for method in mosaickv rocketkv ada_snapkv snapkv full; do caches+=("$method:bfloat16:128:cuda"); done
fi
if [ "$only" != benchmark ]; then
  # Those that tests ask for whatever --methods says stand first.
  caches+=({full,snapkv,ada_snapkv,rocketkv,rocketkv_mt,h2o}:bfloat16:64:cuda)
  for method in ${methods//,/ }; do caches+=("$method:bfloat16:64:cuda"); done
  if [ "$quick" = no ]; then
    for dim in 256 96 128; do caches+=("full:bfloat16:$dim:cuda"); done
    for method in ${methods//,/ }; do caches+=("$method:float32:64" "$method:bfloat16:64"); done
  fi
fi
mapfile -t caches < <(printf '%s\n' "${caches[@]}" | awk '!seen[$0]++')

echo "--- building ($SECONDS s)"
build "${caches[@]}" &
building=$!
if [ "$only" = benchmark ]; then
  build operators
else
  build operators {ada_snapkv,snapkv,duo_attention,h2o,tova,expected_attention}:bfloat16:64:cuda:pages
fi

# Only the plugins that are named: others of the machine may not fit the pytest that was brought along.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
tests() { timeout -k 5 "$(left)" python3 -m pytest -q -p no:cacheprovider -p pytest_timeout --timeout 120 --tb short "$@" || true; }
if [ "$only" != benchmark ]; then
  echo "--- tests of pages ($SECONDS s)"
  tests tests/pages -v -k cuda
fi
wait "$building" || true
if [ "$only" != benchmark ]; then
  echo "--- tests of memory, errors and captured steps ($SECONDS s)"
  tests tests/test_cuda.py -v --methods "$methods" -k 'not answers' --durations 5
  if [ "$quick" = no ]; then
    echo "--- tests against the CPU and eager attention ($SECONDS s)"
    OMP_NUM_THREADS=2 tests -p xdist.plugin -n 8 -rP --methods "$methods" tests/test_cuda.py tests/test_architectures.py \
      -k 'answers or cuda and logits'
  fi
fi
if [ "$only" != tests ]; then
  echo "--- benchmark ($SECONDS s)"
  # A cell that has begun may take a minute.
  timeout -k 5 "$(left)" python3 benchmark.py --out "$out/benchmark.json" --limit $(($(left) - 75)) "$@" || true
fi
echo "--- done ($SECONDS s)"
