"""What CoLLM itself costs: CPU time of serving, of training and of everything else (Fig. 14).

``python -m bench.overhead``. A real cluster with real replicas serves random arrivals at 1x to 4x
of load while it fine-tunes what it may; every few seconds the CPU time of all processes is read.
Serving is the replicas' inference processes, training their training processes; the rest (gateway,
dispatcher, Redis, launcher, coordinator, the replicas' own processes) is CoLLM itself. 4x is 1.1
times the rate that a closed loop reached just before.

The paper's own measure is another: what pacing and deciding add, over the time of processing. That
is ``paced``: seconds that requests were held back on purpose or spent in the dispatcher, over the
seconds that they took from end to end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.stack import Stack, running

PARTS = ("inference", "training", "collm")
LOADS = (1, 2, 3, 4)
CPU_TIMES = ("user", "system")
Seconds = dict[tuple[str, int], float]  # (part, process) -> CPU seconds so far; collm/NAME


def processes(stack: Stack) -> Iterator[tuple[str, psutil.Process]]:
    """Every process of the system with the part that it belongs to."""
    for name, pid in stack.pids.items():
        parent = psutil.Process(pid)
        yield f"collm/{'replicas' if name.startswith('replica') else name}", parent
        for child in parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                yield _part(name, parent, child), child


def _part(name: str, parent: psutil.Process, child: psutil.Process) -> str:
    """A replica's two children compute; its training process is the one with low priority."""
    if not name.startswith("replica") or "resource_tracker" in " ".join(child.cmdline()):
        return "collm/replicas" if name.startswith("replica") else f"collm/{name}"
    return "training" if child.nice() > parent.nice() else "inference"


def cpu(stack: Stack) -> Seconds:
    used: Seconds = {}
    for part, process in processes(stack):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[part, process.pid] = float(sum(getattr(times, kind) for kind in CPU_TIMES))
    return used


def spent(before: Seconds, after: Seconds) -> dict[str, float]:
    """CPU seconds by part between two readings; a process that ended between them is left out."""
    total = dict.fromkeys(PARTS, 0.0)
    for key, seconds in after.items():
        total[key[0].partition("/")[0]] += seconds - before.get(key, 0.0)
    return total


def own(before: Seconds, after: Seconds) -> dict[str, float]:
    """The same for each part of CoLLM itself."""
    total: dict[str, float] = {}
    for key, seconds in after.items():
        part, _, name = key[0].partition("/")
        if part == "collm":
            total[name] = total.get(name, 0.0) + seconds - before.get(key, 0.0)
    return total


def shares(seconds: dict[str, float]) -> dict[str, float] | None:
    """Parts of the whole; None where nothing was computed."""
    whole = sum(seconds.values())
    return {part: s / whole for part, s in seconds.items()} if whole > 0 else None


def replay(stack: Stack, o: argparse.Namespace, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadgen", "--base-url", stack.url, "--no-progress"]
    command += ["--model", Path(o.model).name, "--ignore-eos", *more]
    command += ["--prompt-tokens", str(o.prompt), "--output-tokens", str(o.output)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(client: subprocess.Popen[str]) -> dict[str, Any]:
    """Raises RuntimeError."""
    out, errors = client.communicate()
    if client.returncode:
        raise RuntimeError(f"load generator ended with {client.returncode}:\n{errors[-2000:]}")
    result: dict[str, Any] = json.loads(out)
    return result


def capacity(stack: Stack, o: argparse.Namespace) -> float:
    """Requests/s with as many clients as the replicas take at once."""
    result = result_of(
        replay(
            stack, o, "--request-rate", "inf", "--limit", str(o.probe), "--max-concurrency", "24"
        )
    )
    return float(result["request_throughput"])


def at(stack: Stack, o: argparse.Namespace, load: int, rate: float) -> dict[str, Any]:
    """One load for ``o.seconds``."""
    client = replay(stack, o, "--request-rate", f"{rate:.4f}", "--duration", f"{o.seconds:g}")
    began = before = cpu(stack)
    dispatched = dispatching(stack)
    windows: list[dict[str, float]] = []
    ends = time.monotonic() + o.seconds
    while (left := ends - time.monotonic()) > 0 and client.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(min(o.window, left))
        now = cpu(stack)
        if (found := shares(spent(before, now))) is not None:
            windows.append(found)
        before = now
    whole = spent(began, before)
    result = result_of(client)
    answering = result["completed"] * (result["mean_e2el_ms"] or 0.0) / 1e3
    row = {
        "load": load,
        "paced": round((dispatching(stack) - dispatched) / answering, 4) if answering else None,
        "rate": round(rate, 3),
        "cpu_s": {part: round(s, 2) for part, s in whole.items()},
        "collm_cpu_s": {name: round(s, 2) for name, s in own(began, before).items()},
        "shares": {part: round(s, 4) for part, s in (shares(whole) or {}).items()},
        "collm_worst_window": round(max(w["collm"] for w in windows), 4),
        "completed": result["completed"],
        "failed": result["failed"] + result["shed"],
        "output_tokens_s": round(result["output_throughput"], 1),
        "p50_tpot_ms": result["p50_tpot_ms"],
    }
    print(row, file=sys.stderr, flush=True)
    return row


def dispatching(stack: Stack) -> float:
    """Seconds so far that requests were held back on purpose or spent in the dispatcher itself."""
    sums = ("collm_dispatcher_hold_seconds_sum", "collm_dispatcher_added_seconds_sum")
    return sum(sum(stack.metric("dispatcher", name)) for name in sums)


def give_data(stack: Stack, o: argparse.Namespace, folder: Path) -> None:
    """Chats for an adapter, over all replicas, so that those that rest have something to do."""
    lines = []
    for number in range(o.replicas * 40):
        asked = {"role": "user", "content": f"What is item {number} of the list?"}
        told = {"role": "assistant", "content": f"Item {number} is the number {number * 7 % 101}."}
        lines.append(json.dumps({"messages": [asked, told]}))
    file = folder / "chats.jsonl"
    file.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "collm", "data", "add", str(file), "--adapter", "overhead"]
    command += ["--shard", str(o.replicas), "--data-dir", str(stack.data_dir)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    p.add_argument("--model", default="SmolLM2-135M-Instruct")
    p.add_argument("--replicas", type=int, default=3)
    p.add_argument("--prompt", type=int, default=200, help="tokens")
    p.add_argument("--output", type=int, default=60, help="tokens")
    p.add_argument("--probe", type=int, default=48, help="requests that measure the capacity")
    p.add_argument("--seconds", type=float, default=60.0, help="of each load")
    p.add_argument("--window", type=float, default=5.0, help="seconds between two readings")
    o = p.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(["--model", o.model, "--replicas", str(o.replicas)]) as stack,
    ):
        full = 1.1 * capacity(stack, o)
        give_data(stack, o, Path(folder))
        rows = [at(stack, o, load, full * load / 4) for load in LOADS]
    ours = [r["shares"]["collm"] for r in rows]
    line = {
        "bench": "overhead",
        "loads": rows,
        "collm_mean": round(statistics.fmean(ours), 4),
        "collm_worst": max(ours),
        "paced_mean": round(statistics.fmean(r["paced"] or 0.0 for r in rows), 4),
        "paced_worst": max(r["paced"] or 0.0 for r in rows),
        "collm_worst_window": max(r["collm_worst_window"] for r in rows),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
