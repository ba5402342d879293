# Sourced by gpu.sh: steps that are timed, written down and ended when they hang. Wants `limit`, seconds for everything,
# and `logs`, a folder; counts in `failed`.

failed=0
note() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$logs/steps.tsv"; }

# step NAME SILENCE COMMAND...: runs it within the whole script's limit, and ends it when it prints nothing for SILENCE
# seconds: what is slow goes on, what hangs does not. What it prints goes to NAME.log.
step() {
  local name=$1 silence=$2 left=$((limit - SECONDS)) begin=$SECONDS heard=$SECONDS size=-1 now status pid hung=0
  shift 2
  if [ "$left" -le 0 ]; then
    echo "$name: not started, the limit of $limit s is used up"
    note "$name" 124 0
    return 124
  fi
  timeout --kill-after=5 "$left" "$@" >"$logs/$name.log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    now=$(stat --format=%s "$logs/$name.log" 2>/dev/null)
    [ "$now" = "$size" ] || { size=$now heard=$SECONDS; }
    if [ $((SECONDS - heard)) -ge "$silence" ]; then
      hung=1
      kill "$pid" 2>/dev/null  # timeout hands it on, and kills what does not listen
      break
    fi
  done
  wait "$pid"
  status=$?
  [ "$hung" -eq 1 ] && status=silent
  note "$name" "$status" $((SECONDS - begin))
  echo "$name: exit status $status after $((SECONDS - begin)) s;" \
    "$(grep -v '^ *$' "$logs/$name.log" | tail -n 1 | cut -c 1-150)"
  [ "$status" = 0 ]
}
attempt() {
  step "$@" && return
  failed=$((failed + 1))
  return 1
}
