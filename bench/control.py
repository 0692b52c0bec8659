"""Ceiling of the control plane: gateway + dispatcher + Redis with replicas that take no time.

``python -m bench.control``. Closed loop for requests/s (wrk where it is on PATH, else the load
generator's own client in a process of its own), then an open Poisson loop at half that rate for
the latency that the control plane adds. Streaming and not are interleaved; medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.stack import Stack, quantile, running

# Short on purpose: tokenising is per token and belongs to the prompt, not to the control plane.
PROMPT = "Explain in a few words what a distributed queue is and when it is the wrong tool."
ADDED = "collm_dispatcher_added_seconds"
CALM_RATE = 500.0  # requests/s: the same load on machines of any speed, beside half of the ceiling
LUA = """
wrk.method = "POST"
wrk.body = [[{body}]]
wrk.headers["content-type"] = "application/json"
local errors = 0
response = function(status, headers, body)
  if status ~= 200 then errors = errors + 1 end
end
"""


def body(model: str, tokens: int, stream: bool) -> str:
    """The request that is sent over and over."""
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return json.dumps(request)


def closed_loop(stack: Stack, model: str, o: argparse.Namespace, stream: bool) -> dict[str, Any]:
    """Requests/s with ``o.connections`` clients that never pause, and the CPU time it took."""
    before = stack.cpu_seconds()
    if shutil.which("wrk"):
        completed, rate, failed = _wrk(stack.url, body(model, o.tokens, stream), o)
    else:
        completed, rate, failed = _own(stack.url, model, o, stream)
    after = stack.cpu_seconds()
    per_thousand = {k: round((after[k] - before[k]) / completed * 1e3, 4) for k in after}
    return {"rps": rate, "completed": completed, "failed": failed, "cpu": per_thousand}


def _wrk(url: str, content: str, o: argparse.Namespace) -> tuple[int, float, int]:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA.replace("{body}", content))
        script.flush()
        command = ["wrk", "-t1", f"-c{o.connections}", f"-d{o.seconds}s", "--timeout", "30s"]
        command += ["-s", script.name, f"{url}/v1/chat/completions"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    completed = int(_found(r"(\d+) requests in", out))
    rate = float(_found(r"Requests/sec:\s+([\d.]+)", out))
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    return completed, rate, int(failed.group(1)) if failed else 0


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"wrk printed no {pattern!r}:\n{text}")
    return match.group(1)


def _own(url: str, model: str, o: argparse.Namespace, stream: bool) -> tuple[int, float, int]:
    limit = o.seconds * 1000  # ends by the number; the rate is what it took
    result = _replay(
        url, model, o, stream,
        "--request-rate", "inf", "--limit", str(limit), "--max-concurrency", str(o.connections),
    )  # fmt: skip
    return result["completed"], result["request_throughput"], result["failed"] + result["shed"]


def open_loop(
    stack: Stack, model: str, o: argparse.Namespace, rate: float, stream: bool
) -> dict[str, Any]:
    """A Poisson run of the load generator at ``rate``; its whole result."""
    return _replay(
        stack.url, model, o, stream,
        "--request-rate", f"{rate:.1f}", "--duration", str(o.seconds),
    )  # fmt: skip


def _replay(
    url: str, model: str, o: argparse.Namespace, stream: bool, *more: str
) -> dict[str, Any]:
    command = [sys.executable, "-m", "loadgen", "--base-url", url, "--model", model, *more]
    command += ["--output-tokens", str(o.tokens), "--prompt-tokens", "20", "--ignore-eos"]
    command += ["--no-progress", *([] if stream else ["--no-stream"])]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"load generator ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(stack: Stack, model: str, o: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the line that is printed."""
    warm = argparse.Namespace(**{**vars(o), "seconds": 2})
    for stream in (False, True):
        closed_loop(stack, model, warm, stream)
    rounds: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(o.rounds):
        for stream in (False, True):
            one = closed_loop(stack, model, o, stream)
            rounds[stream].append(one)
            _say(f"round {number + 1}, {'stream' if stream else 'plain'}: {one}")
    rps = {stream: statistics.median(r["rps"] for r in found) for stream, found in rounds.items()}
    before = stack.buckets("dispatcher", ADDED)
    plain = open_loop(stack, model, o, rps[False] / 2, False)
    added = quantile(before, stack.buckets("dispatcher", ADDED), 0.99)
    streamed = open_loop(stack, model, o, rps[True] / 2, True)
    calm = open_loop(stack, model, o, CALM_RATE, False)
    return {
        "bench": "control",
        "rps": round(rps[False], 1),
        "rps_stream": round(rps[True], 1),
        "added_ms_p50": plain["p50_e2el_ms"],
        "added_ms_p99": plain["p99_e2el_ms"],
        "dispatcher_added_ms_p99": None if added is None else round(1e3 * added, 2),
        "calm_rate": CALM_RATE,
        "calm_ms_p50": calm["p50_e2el_ms"],
        "calm_ms_p99": calm["p99_e2el_ms"],
        "cpu_s_per_1k": _median_cpu(rounds[False]),
        "cpu_s_per_1k_stream": _median_cpu(rounds[True]),
        "rps_rounds": [round(r["rps"], 1) for r in rounds[False]],
        "rps_stream_rounds": [round(r["rps"], 1) for r in rounds[True]],
        "stream_ttft_ms_p50": streamed["p50_ttft_ms"],
        "stream_ttft_ms_p99": streamed["p99_ttft_ms"],
        "stream_e2e_ms_p99": streamed["p99_e2el_ms"],
        "latency_rate": round(rps[False] / 2, 1),
        "client_lag_p99_ms": plain["client_lag_p99_ms"],
        "failed": sum(r["failed"] for found in rounds.values() for r in found),
        "tokens": o.tokens,
        "prompt": f"{len(PROMPT)} characters",
        "replicas": o.replicas,
        "connections": o.connections,
        "load": "wrk" if shutil.which("wrk") else "loadgen",
        "rss_mb": stack.rss_mb(),
        "engine": "emulated, profile zero",
    }


def _median_cpu(found: list[dict[str, Any]]) -> dict[str, float]:
    parts = found[0]["cpu"]
    return {part: statistics.median(r["cpu"][part] for r in found) for part in parts}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m bench.control", description=__doc__)
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="its tokenizer is used")
    p.add_argument("--replicas", type=int, default=2)
    p.add_argument("--connections", type=int, default=64)
    p.add_argument("--tokens", type=int, default=16, help="output tokens of each request")
    p.add_argument("--seconds", type=int, default=10, help="of each round")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--policy", default=None)
    o = p.parse_args()
    up = ["--model", o.model, "--replicas", str(o.replicas), "--no-train"]
    up += ["--engine", "emulated", "--profile", "zero"]
    up += ["--policy", o.policy] if o.policy else []
    with running(up) as stack:
        line = measure(stack, Path(o.model).name, o)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
