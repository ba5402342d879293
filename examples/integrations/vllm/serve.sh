#!/usr/bin/env bash
# Serves the shipped model, or MODEL, with one method through vLLM's OpenAI-compatible server, asks a question about a
# long document, and prints what the request held and read beside a request that stays whole.
#
#   examples/integrations/vllm/serve.sh [METHOD [BUDGET]]     in an environment as test.sh makes it
#   VENV=FOLDER serve.sh                                      which is this one
#   PORT=8123 MODE=chunked MODEL=PATH serve.sh keydiff 512
#   MODE=uneven serve.sh ada_snapkv 256                       heads that compete for the budget
#   MODE=read serve.sh quest 256                              steps that read a part of the cache
#   KEEP=1 serve.sh                                           the server goes on until Ctrl-C
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
root=$(cd ../../.. && pwd)
method=${1:-snapkv} budget=${2:-256} mode=${MODE:-compact} port=${PORT:-8123}
if [ -n "${VENV:-}" ]; then source "$VENV/bin/activate"; fi
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT

model=${MODEL:-$root/examples/model}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
export HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR}

python -m tessera_vllm.build --model "$model" --methods "$method"
settings=$(printf '{"tessera": {"mode": "%s", "method": "%s", "budget": %d, "figures": "%s"}}' \
  "$mode" "$method" "$budget" "$work/figures.jsonl")
# As `vllm serve` does; that command asks for a package called vllm, which the CPU's wheel is not.
echo "python -m vllm.entrypoints.openai.api_server --model MODEL --worker-cls tessera_vllm.worker.Worker \\"
echo "  --scheduler-cls tessera_vllm.scheduler.Scheduler --additional-config '$settings'"
python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name shipped --port "$port" \
  --block-size 32 --enforce-eager --max-model-len 8192 \
  --worker-cls tessera_vllm.worker.Worker --scheduler-cls tessera_vllm.scheduler.Scheduler \
  --additional-config "$settings" >"$work/server.log" 2>&1 &
server=$!
if ! python "$here/ask.py" --port "$port" --server "$server" --figures "$work/figures.jsonl"; then
  tail -n 30 "$work/server.log" >&2
  exit 1
fi
if [ -n "${KEEP:-}" ]; then echo "The server answers on port $port until Ctrl-C."; wait "$server"; fi
