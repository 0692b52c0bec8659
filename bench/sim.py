"""Speed of the simulator, its cost against cluster size, its memory against the trace's length.

``python -m bench.sim``; with ``--data`` also its validity against real runs (``bench/validity.py``,
``bench/cpu_validity.py``): with the defaults two clusters, two loads and three policies, about 40
minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import azure, cpu_validity, validity
from shared import slo
from sim.scenario import Scenario, run
from sim.workload import Workload
from sim.world import Delays

SPEED_SLO = ("e2e:20s",)
SHORTER = 10  # times fewer requests, to see whether memory grows with them


def speed(replicas: int, requests: int, policy: str) -> dict[str, float]:
    """CPU seconds, requests/s and MB of one simulation at about 70 % load, in a fresh process."""
    rate = 1.4 * replicas
    code = (
        "import json,sys\n"
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
        "rss_mb": round(peak_mb(), 1),
        "attainment": result["slo_attainment"],
    }


def peak_mb(status: Path = Path("/proc/self/status")) -> float:
    """Most memory that this program has had resident, MB.

    Linux's VmHWM begins with the program; ``ru_maxrss`` goes back to the process that started it,
    whose memory may have been larger.
    """
    try:
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1e3
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__)
    add = p.add_argument
    add("--requests", type=int, default=200_000, help="of the speed run (16 replicas)")
    add("--sizes", type=int, nargs="+", default=[16, 1000, 10_000], help="clusters, in replicas")
    add("--size-requests", type=int, default=50_000, help="for each of --sizes")
    add(
        "--speed-policy",
        default="collm",
        help="(%(default)s; least_loaded looks at every replica for every request)",
    )
    add("--data", type=Path, metavar="FOLDER", help=f"for the validity runs: {azure.SOURCE}")
    add("--trace", action="append", default=[], metavar="TAG=CSV", help="instead of --data")
    add("--policies", nargs="+", default=["least_loaded", "round_robin", "collm"])
    # 2x and 4x of the evaluation's load, on half of its replicas, slowed ten times.
    add("--loads", type=float, nargs="+", default=[0.06, 0.125], help="of the recorded rate")
    add("--replicas", type=int, default=8)
    add("--profile", default="h20-8b")
    add("--model", default="SmolLM2-135M-Instruct")
    add("--slo", nargs="+", default=["ttft:1000", "tpot:50"])
    add("--seconds", type=float, default=120.0, help="of arrivals, each run")
    add("--kinds", nargs="+", default=["emulated", "cpu"], choices=("emulated", "cpu"))
    add("--cpu-replicas", type=int, default=2, help="real ones, one thread each")
    # Half full and full where a decode step of the model takes about 90 ms.
    add("--cpu-loads", type=float, nargs="+", default=[0.2, 0.45], help="of the recorded rate")
    add("--cpu-slo", nargs="+", default=["e2e:5000"])
    add("--slow", type=float, default=10.0, help="slow the emulated hardware down")
    o = p.parse_args(arguments)
    if o.requests < SHORTER:
        p.error(f"--requests: at least {SHORTER} expected, not {o.requests}")
    if o.data is not None:
        try:
            o.trace = [f"{tag}={path}" for tag, path in azure.traces(o.data).items()]
        except azure.NoTraces as e:
            p.exit(2, f"bench.sim: {e}\n")
    return o


def main() -> None:
    o = options()
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
    runs = {}
    for requests in (o.requests // SHORTER, o.requests):
        runs[requests] = speed(16, requests, o.speed_policy)
        print(f"{requests:,} requests: {runs[requests]}", file=sys.stderr, flush=True)
    short, fast = runs.values()
    sizes = {}
    for size in o.sizes:
        sizes[str(size)] = speed(size, o.size_requests, o.speed_policy)["requests_s"]
        print(size, sizes[str(size)], file=sys.stderr, flush=True)
    return {
        "bench": "sim",
        "requests_s": fast["requests_s"],
        "rss_mb": fast["rss_mb"],
        "rss_mb_by_requests": {str(requests): r["rss_mb"] for requests, r in runs.items()},
        "rss_ratio": round(fast["rss_mb"] / short["rss_mb"], 3),
        "requests": o.requests,
        "policy": o.speed_policy,
        "replicas": sizes,
        "slowed": o.slow,
        "validity": both(o, folder) if o.trace else [],
    }


if __name__ == "__main__":
    main()
