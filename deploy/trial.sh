#!/usr/bin/env bash
# Tries a running compose system from the host: a chat, a trace replay during which a replica is
# killed, drained queues. Usage: deploy/trial.sh TRACE.csv PROMPTS.jsonl [REQUESTS]
set -euo pipefail
trace=${1:?a trace} prompts=${2:?chats as JSON Lines} requests=${3:-60}
url=${COLLM_URL:-http://127.0.0.1:8000}
collm=${COLLM:-.venv/bin/collm}
docker=${DOCKER:-docker}
project=${PROJECT:-collm}
results=$(mktemp -d)

echo "-- a chat"
"$collm" chat --url "$url" --temperature 0 --max-tokens 24 "Name three rivers."

echo "-- $requests requests of a trace; a replica is killed in the middle"
"$collm" replay --base-url "$url" --trace "$trace" --prompts "$prompts" --limit "$requests" \
  --prompt-scale 0.02 --max-output 24 --rate-scale 1 --goodput e2el:30000 --no-progress \
  --save-result --result-dir "$results" --result-filename replay.json >"$results/replay.log" 2>&1 &
replay=$!
until grep -q . <("$docker" exec "$project-gateway-1" collm queues --json 2>/dev/null |
  grep -oE '"in_flight":[1-9]'); do kill -0 $replay || break; done
"$docker" kill "$project-replica-1-1" >/dev/null
wait $replay || { cat "$results/replay.log"; exit 1; }
python3 - "$results/replay.json" "$requests" <<'PY'
import json, sys
result = json.load(open(sys.argv[1]))
print({k: result[k] for k in ("completed", "failed", "shed", "output_throughput", "p99_e2el_ms")})
sys.exit(result["completed"] != int(sys.argv[2]))
PY

echo "-- drained"
"$docker" exec "$project-gateway-1" collm queues --json | python3 -c '
import json, sys
found = json.load(sys.stdin)
full = {n: s for n, s in found["streams"].items() if s["length"] or s["pending"]}
print("replicas:", {r["id"]: r["state"] for r in found["replicas"]}, "not drained:", full)
sys.exit(bool(full))'
