"""Speed of the simulator, its cost against cluster size, and its validity against real runs.

``python -m bench.sim``; validity with ``--trace`` (``bench/validity.py``).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import cpu_validity, validity
from shared import slo
from sim.scenario import Scenario, run
from sim.workload import Workload
from sim.world import Delays

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
    p.add_argument("--kinds", nargs="+", default=["emulated", "cpu"], choices=("emulated", "cpu"))
    p.add_argument("--cpu-replicas", type=int, default=2, help="real ones, one thread each")
    p.add_argument("--cpu-loads", type=float, nargs="+", default=[1.0, 2.0])
    p.add_argument("--cpu-slo", nargs="+", default=["e2e:5000"])
    p.add_argument("--slow", type=float, default=10.0, help="slow the emulated hardware down")
    o = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(o, Path(folder))), flush=True)


def both(o: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Validity on the clusters asked for."""
    found: list[dict[str, Any]] = []
    if "cpu" in o.kinds:
        found += cpu_validity.validity(o, folder)
    if "emulated" in o.kinds:
        if o.slow != 1.0:
            o.profile = validity.slowed(o.profile, o.slow, folder)
            o.slo = validity.slowed_slo(o.slo, o.slow)
        found += validity.validity(o)
    return found


def measure(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
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
        "validity": both(o, folder) if o.trace else [],
    }


if __name__ == "__main__":
    main()
