"""Speed of the simulator, its cost against cluster size, and its validity against real runs.

``python -m bench.sim``. Validity: the same requests go (a) through the whole real system with
emulated replicas in real time and (b) through the simulator with the same policy and profile;
relative errors of goodput, attainment and end-to-end latency are printed. Arrivals and lengths of
(b) are those that (a) really had.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bench.stack import running
from collm import models
from shared import profile, slo
from sim.scenario import Scenario, run
from sim.workload import Workload
from sim.world import Delays

EPOCH = 1_700_000_000.0
VOID_ABOVE = 0.05  # step lag p99 of an emulated replica beyond which its run says nothing
SPEED_SLO = ("e2e:20s",)


def speed(replicas: int, requests: int, policy: str) -> dict[str, float]:
    """CPU seconds and requests/s of one simulation at about 70 % load, in a fresh process."""
    rate = 1.4 * replicas
    code = (
        "import json,resource,sys,time\n"
        "from bench.sim import one_speed\n"
        f"print(json.dumps(one_speed({replicas}, {requests}, {policy!r}, {rate})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_speed(replicas: int, requests: int, policy: str, rate: float) -> dict[str, float]:
    """Called in the fresh process: its peak memory is the simulation's own."""
    turn = 0.0 if replicas <= 64 else 0.01  # a dispatcher of that size decides in turns
    work = Workload(
        rate=rate, burstiness=0.5, prompt_tokens=1000, output_tokens=100, limit=requests,
        slos=slo.parse(SPEED_SLO),
    )  # fmt: skip
    scenario = Scenario(
        profile="h20-8b", replicas=replicas, policy=policy, workload=work, delays=Delays(turn=turn)
    )
    started, wall = time.process_time(), time.perf_counter()
    result = run(scenario)
    cpu = time.process_time() - started
    return {
        "cpu_s": round(cpu, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "requests_s": round(requests / cpu, 1),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
        "attainment": result["slo_attainment"],
    }


def slowed(name: str, factor: float, folder: Path) -> str:
    """A profile whose every duration is ``factor`` times as long, as a file.

    Real time is the limit of an emulated run: steps of some ms are lost in a small machine's
    scheduling. Slowed, the same cluster is emulated faithfully; rates and limits are slowed alike.
    """
    known = profile.load(name)
    values = msgspec.to_builtins(known)
    values["coefficients"] = {k: v * factor for k, v in values["coefficients"].items()}
    for key in ("load_seconds", "adapter_seconds", "merge_seconds"):
        values[key] *= factor
    values["source"] = f"{known.source}; slowed {factor:g} times for a run in real time"
    path = folder / "slowed.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def slowed_slo(parts: Sequence[str], factor: float) -> list[str]:
    """The same limits, ``factor`` times as long (ms)."""
    found = []
    for tag, limits in slo.parse(parts).items():
        pairs = (("ttft", limits.ttft_ms), ("tpot", limits.tpot_ms), ("e2e", limits.e2e_ms))
        prefix = f"{tag}/" if tag else ""
        found += [f"{prefix}{name}:{ms * factor:g}" for name, ms in pairs if ms is not None]
    return found


def real_run(policy: str, load: float, o: argparse.Namespace) -> dict[str, Any]:
    """The trace through the running system with emulated replicas; the detailed result."""
    up = ["--model", o.model, "--replicas", str(o.replicas), "--no-train", "--policy", policy]
    up += ["--engine", "emulated", "--profile", o.profile]
    with running(up) as stack, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loadgen", "--base-url", stack.url, "--ignore-eos"]
        for path in o.trace:
            command += ["--trace", path]
        command += [
            "--trace-align",
            "start",
            "--rate-scale",
            str(load),
            "--duration",
            str(o.seconds),
            "--no-progress",
        ]
        command += ["--max-prompt", "7000", "--goodput", *o.slo, "--slo-headers"]
        command += ["--save-detailed", "--result-dir", folder, "--result-filename", "run.json"]
        command += ["--tokenizer", str(models.resolve(o.model).path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the load generator failed:\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
        result["step_lag_p99"] = stack.step_lag()
    return result


def simulated(real: Mapping[str, Any], policy: str, o: argparse.Namespace) -> dict[str, Any]:
    """The requests of a real run through the simulator.

    As in that run (no coordinator) the policy fits its latencies from what replicas report.
    """
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    lines: dict[str, list[str]] = {}
    for request in real["requests"]:
        moment = datetime.fromtimestamp(EPOCH + request["sent"], UTC)
        tokens = request["input_tokens"] or request["asked_prompt"]
        stamp = moment.strftime("%Y-%m-%d %H:%M:%S.%f+00:00")
        rows = lines.setdefault(request["tag"] or "all", [head])
        rows.append(f"{stamp},{tokens},{request['asked_output']}")
    with tempfile.TemporaryDirectory() as folder:
        traces = []
        for tag, rows in lines.items():
            path = Path(folder) / f"{tag}.csv"
            path.write_text("\n".join(rows) + "\n", encoding="utf-8")
            traces.append((tag, path))
        work = Workload(traces=tuple(traces), slos=slo.parse(o.slo))
        return run(
            Scenario(
                profile=o.profile,
                replicas=o.replicas,
                policy=policy,
                workload=work,
                learn=True,
            )
        )


def error(real: Mapping[str, Any], sim: Mapping[str, Any], key: str) -> float | None:
    """(simulated - real) / real; attainment as a plain difference of shares."""
    a, b = real[key], sim[key]
    if a is None or b is None or not a:
        return None
    return round(float(b - a if key == "slo_attainment" else (b - a) / a), 4)


def validity(o: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a policy and load."""
    found = []
    for load in o.loads:
        for policy in o.policies:
            real = real_run(policy, load, o)
            sim = simulated(real, policy, o)
            entry = {
                "policy": policy,
                "load": load,
                "cluster": f"{o.replicas} x {Path(o.profile).stem}, emulated in real time",
                "goodput_error": error(real, sim, "goodput_tokens_per_s"),
                "attainment_error": error(real, sim, "slo_attainment"),
                "e2e_p50_error": error(real, sim, "p50_e2el_ms"),
                "e2e_p99_error": error(real, sim, "p99_e2el_ms"),
                "ttft_p99_error": error(real, sim, "p99_ttft_ms"),
                "real": {k: real[k] for k in ("slo_attainment", "p50_e2el_ms", "p99_e2el_ms")},
                "client_lag_p99_ms": real["client_lag_p99_ms"],
                "requests": real["offered"],
                "step_lag_p99": real["step_lag_p99"],
                "void": (real["step_lag_p99"] or 0.0) > VOID_ABOVE or real["client_behind"],
            }
            print(entry, file=sys.stderr, flush=True)
            found.append(entry)
    return found


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__)
    p.add_argument("--requests", type=int, default=200_000, help="of the speed run (16 replicas)")
    p.add_argument("--sizes", type=int, nargs="+", default=[16, 1000, 10_000])
    p.add_argument("--size-requests", type=int, default=50_000)
    p.add_argument("--speed-policy", default="least_loaded")
    p.add_argument("--trace", action="append", default=[], help="for the validity runs")
    p.add_argument("--policies", nargs="+", default=["least_loaded", "round_robin", "collm"])
    p.add_argument("--loads", type=float, nargs="+", default=[1.0, 2.0])
    p.add_argument("--replicas", type=int, default=8)
    p.add_argument("--profile", default="h20-8b")
    p.add_argument("--model", default="SmolLM2-135M-Instruct")
    p.add_argument("--slo", nargs="+", default=["ttft:1000", "tpot:50"])
    p.add_argument("--seconds", type=float, default=90.0)
    p.add_argument("--slow", type=float, default=10.0, help="slow the emulated hardware down")
    o = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if o.slow != 1.0:
            o.profile = slowed(o.profile, o.slow, Path(folder))
            o.slo = slowed_slo(o.slo, o.slow)
        print(json.dumps(measure(o)), flush=True)


def measure(o: argparse.Namespace) -> dict[str, Any]:
    """The line that is printed."""
    fast = speed(16, o.requests, o.speed_policy)
    print(fast, file=sys.stderr, flush=True)
    sizes = {}
    for size in o.sizes:
        sizes[str(size)] = speed(size, o.size_requests, o.speed_policy)["requests_s"]
        print(size, sizes[str(size)], file=sys.stderr, flush=True)
    return {
        "bench": "sim",
        "requests_s": fast["requests_s"],
        "rss_mb": fast["rss_mb"],
        "requests": o.requests,
        "policy": o.speed_policy,
        "replicas": sizes,
        "slowed": o.slow,
        "validity": validity(o) if o.trace else [],
    }


if __name__ == "__main__":
    main()
