#!/usr/bin/env bash
# Tries a running compose system from the host: a chat, a federated round over three replicas whose
# adapter then answers, a trace replay during which a replica is killed, drained queues.
# Usage: deploy/trial.sh TRACE.csv PROMPTS.jsonl [REQUESTS]
# A round takes minutes with the defaults; start the system with deploy/trial.yml for a short one.
set -euo pipefail
trace=${1:?a trace} prompts=${2:?chats as JSON Lines} requests=${3:-60}
url=${COLLM_URL:-http://127.0.0.1:8000}
collm=${COLLM:-.venv/bin/collm}
docker=${DOCKER:-docker}
project=${PROJECT:-collm}
results=$(mktemp -d)
inside() { "$docker" exec -i "$project-gateway-1" "$@"; }

echo "-- a chat [${SECONDS}s]"
"$collm" chat --url "$url" --temperature 0 --max-tokens 24 "Name three rivers."

echo "-- a federated round [${SECONDS}s]"
head -n 24 "$prompts" | inside sh -c 'cat > /tmp/chats.jsonl'
inside collm data add /tmp/chats.jsonl --adapter trial --shard 3
until inside collm events --json -n 200 | grep -q '"kind": *"round_done"'; do
  if [ $SECONDS -gt "${ROUND_SECONDS:-400}" ]; then
    echo "no round was done:" && inside collm events -n 40 && exit 1
  fi
  sleep 1
done
inside collm events -n 200 | grep -E 'session_|round_' || true
inside collm adapters show trial
"$collm" chat --url "$url" --model trial --temperature 0 --max-tokens 24 "Name three rivers."
inside collm data remove --adapter trial >/dev/null # so that no further session starts

echo "-- $requests requests of a trace; a replica is killed in the middle [${SECONDS}s]"
"$collm" replay --base-url "$url" --trace "$trace" --prompts "$prompts" --limit "$requests" \
  --prompt-scale 0.02 --max-output 24 --rate-scale 1 --goodput e2el:30000 --no-progress \
  --save-result --result-dir "$results" --result-filename replay.json >"$results/replay.log" 2>&1 &
replay=$!
until grep -q . <(inside collm queues --json 2>/dev/null | grep -oE '"in_flight": *[1-9]'); do
  kill -0 $replay || break
done
"$docker" kill "$project-replica-1-1" >/dev/null
wait $replay || { cat "$results/replay.log"; exit 1; }
python3 - "$results/replay.json" "$requests" <<'PY'
import json, sys
result = json.load(open(sys.argv[1]))
print({k: result[k] for k in ("completed", "failed", "shed", "output_throughput", "p99_e2el_ms")})
sys.exit(result["completed"] != int(sys.argv[2]))
PY

echo "-- drained [${SECONDS}s]"
drained() { # a gateway trims what it has read half a second later
  inside collm queues --json | python3 -c '
import json, sys
found = json.load(sys.stdin)
full = {n: s for n, s in found["streams"].items() if s["length"] or s["pending"]}
print("replicas:", {r["id"]: r["state"] for r in found["replicas"]}, "not drained:", full)
sys.exit(bool(full))'
}
until drained; do
  if [ $((tries = ${tries:-0} + 1)) -gt 20 ]; then exit 1; fi
done
rm -r "$results"
echo "-- all well [${SECONDS}s]"
