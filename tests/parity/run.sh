#!/usr/bin/env bash
# Compares what methods keep with kvpress on the example model. Not part of CI: it needs PyTorch,
# and g++ for the caches of examples/integrations/pytorch.
#   tests/parity/run.sh TOOL [parity.py's options]
# VENV: a virtual environment to use; without it build/parity_venv is made.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
tool=$1
shift
venv=${VENV:-$root/build/parity_venv}
if [[ ! -x $venv/bin/python ]]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet -r "$root/tests/parity/requirements.txt"
fi
# ninja is the environment's; PyTorch's threads and the caches' take turns: those that wait must not spin.
export PATH=$venv/bin:$PATH OMP_WAIT_POLICY=passive
exec "$venv/bin/python" "$root/tests/parity/parity.py" "$tool" "$@"
