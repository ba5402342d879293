#!/usr/bin/env bash
# Builds and runs the GPU tests, the sanitizers and the benchmarks on a machine with CUDA, from this repository alone
# and without any registry, and writes a record: DATE-GPU.md and DATE-GPU.json.
#
#   benchmarks/gpu.sh [--only tests,tool,benchmarks,sanitizers] [--prebuilt FOLDER] [--out FOLDER] [--limit SECONDS]
#                     [--scale FRACTION] [--tool-scale FRACTION] [--commit NAME] [--quick]
#
#   --only       what to run; all four unless given
#   --prebuilt   a folder with test_gpu_attend and the other test_gpu_*, bench_cuda, tessera, ..., built elsewhere for this GPU, and
#                the shared libraries that they need; nothing is built
#   --out        where the record goes, and the logs as one archive; benchmarks/results unless given, logs in build/gpu
#   --limit      seconds for everything, 3600 unless given; what does not fit is recorded as failed
#   --scale      TESSERA_TEST_SCALE of the sanitizers, 0.05 unless given
#   --tool-scale how many budgets and lengths of documents the tool is asked about, 1 unless given: all
#   --commit     written into the record where git cannot tell
#   --quick      every benchmark program runs once, over small shapes where it has any: does it still work? Its times say nothing and
#                do not go into the record
#
# A step that fails, or prints nothing for some minutes, is recorded as failed and the next one runs; the record is written in any case.
# `benchmarks/plots/figures_page.py` then writes the page of newest figures, benchmarks/results/README.md, anew.
# The exit status is 0 when every step passed; bars that are missed are only reported.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

only=tests,tool,benchmarks,sanitizers prebuilt='' tool_scale=1 out='' limit=3600 scale=0.05 commit='' no_examples='' quick=''
while [ $# -gt 0 ]; do
  case $1 in
    --only) only=${2:?} ;;
    --prebuilt) prebuilt=${2:?} ;;
    --out) out=${2:?} ;;
    --limit) limit=${2:?} ;;
    --scale) scale=${2:?} ;;
    --tool-scale) tool_scale=${2:?} ;;
    --commit) commit=${2:?} ;;
    --quick) quick=yes; shift; continue ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
  shift 2
done
for part in ${only//,/ }; do
  case $part in
    tests | tool | benchmarks | sanitizers) ;;
    *) echo "gpu.sh: --only is $part; expected tests, tool, benchmarks or sanitizers" >&2; exit 2 ;;
  esac
done
wanted() { [[ ,$only, == *,$1,* ]]; }

# --- what must be there ------------------------------------------------------------------------------------------
command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
missing=0
need() {
  command -v "$1" >/dev/null && return
  echo "gpu.sh: $1 is missing; $2" >&2
  missing=1
}
need nvidia-smi "install the NVIDIA driver"
need python3 "install Python 3.9 or newer (apt-get install python3)"
if [ -z "$prebuilt" ]; then
  need nvcc "install the CUDA toolkit, 12.4 or newer, and put its bin folder on PATH"
  need g++ "install g++ 12 or newer (apt-get install g++)"
  need cmake "install CMake 3.25 or newer (apt-get install cmake)"
  # Catch2, Google Benchmark and Eigen are CMake's to find; it says which package brings a missing one.
fi
wanted sanitizers && need compute-sanitizer "it comes with the CUDA toolkit; or leave it out: --only tests,tool,benchmarks"
[ "$missing" -eq 0 ] || exit 2
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$gpu" ] || { echo "gpu.sh: nvidia-smi finds no GPU on this machine; run this where there is one" >&2; exit 2; }

build=$PWD/build/gpu
logs=$build/logs
rm -rf "$logs"
mkdir -p "$logs" || exit 2

architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
[ "$architecture" = 90 ] && architecture=90a  # with Hopper's own instructions
if git rev-parse HEAD >/dev/null 2>&1; then
  [ -n "$commit" ] || commit=$(git rev-parse --short HEAD)
  git diff --quiet HEAD || commit="$commit and changes since"
fi
commit=${commit:-unknown}
GPU=$gpu COMMIT=$commit \
DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1) \
TOOLKIT=$(nvcc --version 2>/dev/null | sed -n 's/.*release.*, V//p') \
COMPILER=$(g++ --version 2>/dev/null | head -n 1) \
CPU=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1) \
SCALE=$scale PREBUILT=$prebuilt python3 - >"$logs/machine.json" <<'PYTHON'
import datetime, json, os
of = os.environ.get
print(json.dumps({"gpu": of("GPU"), "driver": of("DRIVER"), "toolkit": of("TOOLKIT") or "not there",
                  "compiler": of("COMPILER") or "not there", "cpu": f"{of('CPU')}, {os.cpu_count()} cores",
                  "date": datetime.date.today().isoformat(), "commit": of("COMMIT"),
                  "programs": "built elsewhere" if of("PREBUILT") else "built here",
                  "sanitizers_test_scale": of("SCALE")}))
PYTHON

# --- steps -------------------------------------------------------------------------------------------------------
source benchmarks/steps.sh

finish() {
  trap - EXIT INT TERM
  python3 benchmarks/cuda_record.py --logs "$logs" --out "${out:-benchmarks/results}" || failed=$((failed + 1))
  tar -C "$build" -czf "${out:-$build}/gpu-logs.tar.gz" logs 2>/dev/null
  echo "gpu.sh: $(cut -f 2 "$logs/steps.tsv" 2>/dev/null | grep -c '^0$') steps passed, $failed failed, $SECONDS s"
  exit $((failed > 0))
}
trap finish EXIT
trap 'failed=$((failed + 1)); kill $(jobs -p) 2>/dev/null; exit 1' INT TERM

programs=$prebuilt
if [ -z "$prebuilt" ]; then
  programs=$build/bin
  generator=() keep_going=-k
  command -v ninja >/dev/null && generator=(-G Ninja) && keep_going='-k 0'
  targets=()
  { wanted tests || wanted sanitizers; } && targets+=(test_gpu)
  wanted benchmarks && targets+=(bench_cuda bench_batches bench_forks bench_packed_pages bench_saves bench_strategies)
  configure=(cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DTESSERA_CUDA=ON
    -DCMAKE_CUDA_ARCHITECTURES="$architecture" -DCMAKE_CUDA_FLAGS=-lineinfo)
  # The tool and the decode step of a whole model need the example engine, and more libraries than the rest.
  no_examples='not asked for'
  if wanted tool || wanted benchmarks; then
    if timeout 60 "${configure[@]}" -DTESSERA_BUILD_EXAMPLES=ON >"$logs/configure_examples.log" 2>&1; then
      no_examples=
      wanted benchmarks && targets+=(bench_decode_step bench_turns bench_serving)
      wanted tool && targets+=(tessera)
      wanted tests && targets+=(test_examples_cuda ladder_08_on_the_gpu)
    else
      no_examples=$(sed -n 's/.*tessera: \(.* is missing\).*/\1/p' "$logs/configure_examples.log" | head -n 1)
      no_examples=${no_examples:-CMake could not configure the examples}
    fi
  fi
  if [ -n "$no_examples" ] && ! attempt configure 120 "${configure[@]}" -DTESSERA_BUILD_EXAMPLES=OFF; then
    grep -h -A 3 'tessera: ' "$logs/configure.log" >&2 || tail -n 20 "$logs/configure.log" >&2
    exit 1
  fi
  # shellcheck disable=SC2086 # two words for Ninja
  [ ${#targets[@]} -eq 0 ] || attempt build 900 cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}" -- $keep_going
  grep -E 'error|FAILED' "$logs/build.log" 2>/dev/null | head -n 5
fi
# Shared libraries that came along with programs built elsewhere.
[ -z "$prebuilt" ] || export LD_LIBRARY_PATH=$prebuilt${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# PROGRAM:FILE of all GPU tests, by the rule of cmake/gpu_tests.cmake. CMake makes a file for each method.
test_files() {
  local file folder
  for file in $(grep -rl --include="test_*.cu" TEST_CASE tests/backend/cuda | sed 's,^tests/backend/cuda/,,' | sort); do
    folder=${file%"${file##*/}"} folder=${folder%/}
    [ -n "$folder" ] || folder=operations
    echo "test_gpu_${folder//\//_}:$(basename "$file" .cu)"
  done
  for file in include/tessera/methods/*.hpp; do echo "test_gpu_methods:test_cache_$(basename "$file" .hpp)"; done
}
# each_test_file NAME SILENCE CASES COMMAND...: the command, then the program, as a process for each file of tests, as many at once
# as there are cores: each is bound by one core most of the time. CASES: a filter, or nothing.
each_test_file() {
  local name=$1 silence=$2 cases=$3 pair file
  shift 3
  for pair in $(test_files); do
    file=${pair#*:}
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    step "$name.$file" "$silence" "$@" "$programs/${pair%:*}" -d yes --filenames-as-tags "[#$file]$cases" &
  done
}
count_failed() { failed=$((failed + $(grep -E "^($1)[.]" "$logs/steps.tsv" | cut -f 2 | grep -vc '^0$'))); }

if wanted tests; then
  each_test_file tests 300 ''
  wait
  count_failed tests
  if grep -lE 'No test cases matched|No tests ran' "$logs"/tests.*.log; then
    echo "gpu.sh: these files have no tests in the programs that they belong to"
    failed=$((failed + 1))
  fi
  [ ! -x "$programs/test_examples_cuda" ] || attempt engine_tests 300 "$programs/test_examples_cuda" -d yes
  [ ! -x "$programs/ladder_08_on_the_gpu" ] || attempt ladder 120 "$programs/ladder_08_on_the_gpu"
fi
if wanted tool; then
  if [ -x "$programs/tessera" ]; then
    # All of it took 32 cores and two GPUs 9 minutes, nearly all for the CPU's answers.
    attempt tool 300 python3 benchmarks/gpu_tool.py --tool "$programs/tessera" --scale "$tool_scale" \
      --limit $((limit - SECONDS)) --out "$logs/tool.json"
  else
    echo "tool: not asked, ${no_examples:-the program is not there}"
    note "tool (${no_examples:-the program is not there})" none 0
  fi
fi
if wanted benchmarks; then
  # Each family has a process of its own: behind 200 others RocketKV's choice took 13.6 us instead of 10.7.
  families=$("$programs/bench_cuda" --benchmark_list_tests=true | sed 's,/.*,,' | sort -u)
  [ -n "$families" ] || { echo "bench_cuda: lists no benchmark"; failed=$((failed + 1)); }
  figures=$logs
  if [ -n "$quick" ]; then
    export TESSERA_BENCH_QUICK=1
    figures=$logs/quick
    mkdir -p "$figures"
  fi
  for family in $families; do
    attempt "bench_cuda_$family" 300 "$programs/bench_cuda" --benchmark_filter="^$family(/|\$)" \
      --benchmark_out="$figures/bench_cuda_$family.json" --benchmark_out_format=json
  done
  if grep -q '"error_occurred": true' "$figures"/bench_cuda_*.json 2>/dev/null; then
    echo "bench_cuda: some benchmarks failed, see the record"
    failed=$((failed + 1))
  fi
  if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    attempt peers 300 env PYTHONUNBUFFERED=1 python3 benchmarks/peers/peers.py --out "$figures/peers.json"
  else
    echo "peers: not measured, python3 has no PyTorch that sees the GPU"
    note "peers (no PyTorch that sees the GPU)" none 0
  fi
  [ -x "$programs/bench_batches" ] && attempt batches 120 "$programs/bench_batches" ${quick:+4096}
  [ -x "$programs/bench_forks" ] && attempt forks 120 "$programs/bench_forks" ${quick:+4096 2}
  [ -x "$programs/bench_saves" ] && attempt saves 120 "$programs/bench_saves" ${quick:+4096 410 2 3}
  [ -x "$programs/bench_packed_pages" ] && attempt packed_pages 120 "$programs/bench_packed_pages" ${quick:+4096 2 1 4 4096}
  [ -x "$programs/bench_strategies" ] && attempt strategies 120 "$programs/bench_strategies" ${quick:+2 4096}
  if [ -n "$quick" ] && [ -x "$programs/bench_decode_step" ]; then
    few='--layers 2 --steps 3 --extrapolate 0'
    # shellcheck disable=SC2086 # several words
    {
      attempt decode_step 300 "$programs/bench_decode_step" $few --methods full,snapkv,exact_topk,rocketkv --contexts 1024,8192
      attempt decode_step_batch 300 "$programs/bench_decode_step" $few --methods full,rocketkv --batch 4 --contexts 8192
      attempt decode_step_packed 300 "$programs/bench_decode_step" $few --methods full,quest,mosaickv --share 10 --turn 4096 \
        --batch 2 --contexts 8192
      attempt decode_step_prompts 300 "$programs/bench_decode_step" --layers 2 --methods full,tangram --prompts 4096
      attempt turns 300 "$programs/bench_turns" --layers 2 --prompts 4096 --answers 40 --warm 2048
      attempt serving_short 120 "$programs/bench_serving" --layers 2 --mix short --requests 12 --memory 1
      attempt serving_shared 120 "$programs/bench_serving" --layers 2 --mix shared --requests 6 --memory 1.2
    }
  elif [ -x "$programs/bench_decode_step" ]; then
    attempt decode_step 300 "$programs/bench_decode_step" --json "$logs/decode_step.json"
    attempt decode_step_rocketkv 300 "$programs/bench_decode_step" --methods full,rocketkv --budget 1024 \
      --contexts 1024,32768,98304,131072 --json "$logs/decode_step_rocketkv.json"
    attempt decode_step_batch 300 "$programs/bench_decode_step" --methods full,rocketkv --budget 1024 --batch 4 \
      --contexts 131072 --json "$logs/decode_step_batch.json"
    attempt decode_step_packed 300 "$programs/bench_decode_step" --methods full,quest,mosaickv --share 10 --turn 65536 \
      --batch 4 --contexts 131072,1048576 --json "$logs/decode_step_packed.json"
    attempt decode_step_prompts 300 "$programs/bench_decode_step" --methods full,tangram --budget 8192 \
      --prompts 2048,32768 --json "$logs/decode_step_prompts.json"
    attempt decode_step_long_prompt 300 "$programs/bench_decode_step" --methods tangram --budget 32768 \
      --prompts 131072 --json "$logs/decode_step_long_prompt.json"
    attempt turns 300 "$programs/bench_turns" --prompts 131072,65536,32768 --json "$logs/turns.json"
    attempt serving_short 300 "$programs/bench_serving" --mix short --memory 10 --out "$logs/serving_short.json"
    attempt serving_shared 300 "$programs/bench_serving" --mix shared --requests 20 --memory 16 \
      --out "$logs/serving_shared.json"
  else
    echo "decode_step: not measured, ${no_examples:-the program is not there}"
    note "decode_step (${no_examples:-the program is not there})" none 0
    [ -z "$quick" ] || failed=$((failed + 1))
  fi
fi
if wanted sanitizers; then
  # racecheck takes longest and goes first.
  export TESSERA_TEST_SCALE=$scale
  for tool in racecheck initcheck memcheck synccheck; do
    # Long runs of kernels that have tests of their own show racecheck nothing new, and take it an hour; so does Jacobi's rotation
    # beneath whatever is packed, so that only its own tests look at it.
    some='' options=()
    if [ "$tool" = racecheck ]; then
      some='~[long]' options=(--kernel-name-exclude kns=find_bases_entry)
      step racecheck.bases 600 compute-sanitizer --tool racecheck --error-exitcode 86 --print-limit 20 \
        "$programs/test_gpu_store" -d yes "Jacobi's bases*" &
    fi
    each_test_file "$tool" 600 "$some" compute-sanitizer --tool "$tool" --error-exitcode 86 --print-limit 20 "${options[@]}"
  done
  wait
  count_failed '(race|init|mem|sync)check'
fi
