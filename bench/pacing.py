"""How evenly a replica serves: requests ended a second, round robin against the pacing policy.

``python -m bench.pacing --data FOLDER``: the paper's Figures 5 and 13. The same requests go
through the running system with 16 emulated replicas in real time, and through the simulator.
Printed is the relative variance (variance over squared mean) of requests ended a second on the
replica that ended most of them, the one that the pacing policy fills, and its ratio to round
robin's; and the median over the replicas that served: the last ones have the peaks, so there it
is no smaller. Seconds are the cluster's own: ``--slow`` of the clock's. Last line: JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import azure, measured
from bench.policies import EMULATED, slowed, tokenizer
from bench.stack import running
from bench.validity import VOID_ABOVE, simulated
from bench.validity import slowed as slowed_profile

POLICIES = ("round_robin", "collm")


def dispersion(rows: Sequence[Sequence[float]]) -> float | None:
    """Median over replicas of variance / mean² of what they ended a second."""
    found = []
    for row in rows:
        mean = statistics.fmean(row) if row else 0.0
        if mean > 0:
            found.append(statistics.pvariance(row) / mean**2)
    return round(statistics.median(found), 4) if found else None


def fullest(rows: Sequence[Sequence[float]]) -> float | None:
    """The same of the replica that ended most requests."""
    return dispersion([max(rows, key=sum)]) if rows else None


def coarser(rows: Sequence[Sequence[float]], factor: int) -> list[list[float]]:
    """``factor`` neighbouring bins as one; an incomplete last one is left out."""
    return [
        [sum(row[k : k + factor]) for k in range(0, len(row) - factor + 1, factor)] for row in rows
    ]


async def ends(url: str) -> dict[str, list[float]]:
    """Replica -> Redis seconds at which its requests ended, from the metrics stream."""
    found: dict[str, list[float]] = {}
    for sample in await measured.steps(url):
        times = found.setdefault(sample.replica, [])
        times.extend(sample.time for done in sample.finished if done.output_tokens)
    return found


def binned(times: dict[str, list[float]], width: float) -> list[list[float]]:
    """Counts in bins of ``width`` seconds, from the first end of all to the last."""
    every = [t for row in times.values() for t in row]
    if not every:
        return []
    first = min(every)
    rows = []
    for row in times.values():
        counts = [0.0] * (int((max(every) - first) / width) + 1)
        for t in row:
            counts[int((t - first) / width)] += 1
        rows.append(counts)
    return rows


def one(policy: str, o: argparse.Namespace) -> dict[str, Any]:
    """One policy: in real time, then the same requests simulated."""
    cluster = slowed(EMULATED, o.slow)
    command = [part for trace in o.trace for part in ("--trace", trace)]
    command += ["--duration", str(o.seconds), "--rate-scale"]
    command += [f"{o.scale / o.slow:.5g}", "--ignore-eos", "--slo-headers", "--no-progress"]
    limits = [f"{tag}/{x}" for tag, parts in cluster.slos.items() for x in parts]
    command += ["--goodput", *limits, "--tokenizer", str(tokenizer())]
    with running([*cluster.arguments, "--policy", policy], cluster.environment) as stack:
        with tempfile.TemporaryDirectory() as folder:
            command += ["--save-detailed", "--result-dir", folder, "--result-filename", "r.json"]
            done = subprocess.run(
                [sys.executable, "-m", "loadgen", "--base-url", stack.url, *command],
                check=False, capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"the load generator failed:\n{done.stderr[-2000:]}")
            real: dict[str, Any] = json.loads((Path(folder) / "r.json").read_text())
        rows = binned(asyncio.run(ends(stack.redis)), o.slow)
        lag = stack.step_lag() or 0.0
    with tempfile.TemporaryDirectory() as folder:
        options = argparse.Namespace(
            slo=limits, replicas=16, profile=slowed_profile("h20-8b", o.slow, Path(folder))
        )
        sim = simulated(real, policy, options)
    served = coarser(sim["by_time"]["served"], max(1, round(o.slow)))
    return {
        "policy": policy,
        "real": fullest(rows),
        "simulated": fullest(served),
        "real_median": dispersion(rows),
        "simulated_median": dispersion(served),
        "attainment": real["slo_attainment"],
        "simulated_attainment": sim["slo_attainment"],
        "requests": real["offered"],
        "step_lag_p99": lag,
        "void": lag > VOID_ABOVE,
    }


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m bench.pacing", description=__doc__)
    p.add_argument("--data", type=Path, metavar="FOLDER", help=azure.SOURCE)
    p.add_argument("--trace", nargs="+", metavar="TAG=CSV", help="instead of --data")
    p.add_argument(
        "--scale",
        type=float,
        default=1.26,
        help="of the recorded rate; 2x of the evaluation's load",
    )
    p.add_argument("--seconds", type=float, default=60.0)
    p.add_argument("--slow", type=float, default=1.0)
    o = p.parse_args(arguments)
    try:
        if o.data is not None:
            o.trace = [f"{tag}={path}" for tag, path in azure.traces(o.data).items()]
    except azure.NoTraces as e:
        p.exit(2, f"bench.pacing: {e}\n")
    if not o.trace:
        p.exit(2, f"bench.pacing needs traces: {azure.ADD} (or --trace TAG=CSV …)\n")
    return o


def main() -> None:
    o = options()
    found = {}
    for policy in POLICIES:
        found[policy] = one(policy, o)
        print(found[policy], file=sys.stderr, flush=True)
    ratio = {}
    for kind in ("real", "simulated", "real_median", "simulated_median"):
        base, ours = found["round_robin"][kind], found["collm"][kind]
        ratio[kind] = round(ours / base, 4) if base and ours is not None else None
    print(json.dumps({"bench": "pacing", "runs": list(found.values()), "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
