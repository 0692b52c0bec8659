"""``python -m tests.chaos.soak``: steady load for long; does anything grow?

Memory, descriptors, Redis keys and stream lengths are sampled; a line is fitted to the second
half on (the first is warming up), and its slope is printed with a 95 % confidence interval. The
logs in Redis are kept short, so that they are full before the second half begins: what still grows
then is no log on its way to its bound. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis
from scipy import stats

from shared import names
from shared.redis_client import connect
from tests.chaos import model
from tests.chaos.load import Load
from tests.replica.harness import until
from tests.system.running import System

START_SECONDS, STOP_SECONDS = 600.0, 180.0
WARMING = 0.5  # share of the run that the fits leave out
# What may grow by as much an hour and still count as flat: allocators breathe.
ALLOWED_AN_HOUR = {"memory_mb": 10.0, "descriptors": 5.0, "redis_mb": 5.0, "keys": 20.0}

Series = dict[str, list[tuple[float, float]]]


async def _sample(system: System, redis: Redis, series: Series, now: float) -> None:
    for part, pid in system.pids().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            members = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            memory = sum(m.memory_full_info().uss for m in members) / 1e6
            series[f"memory_mb {part}"].append((now, memory))
            series[f"descriptors {part}"].append((now, sum(m.num_fds() for m in members)))
    info = await redis.info("memory")
    series["redis_mb"].append((now, info["used_memory"] / 1e6))
    series["keys"].append((now, await redis.dbsize()))
    async for key in redis.scan_iter(match=f"{names.PREFIX}*", _type="stream"):
        series[f"stream {key.decode()}"].append((now, await redis.xlen(key)))


async def _all_trainers(redis: Redis, system: System) -> None:
    """Until every replica's training process waits for jobs: one that comes later, as it does on
    a machine without a free core, is a step in memory and not growth."""
    replicas = sum(part.startswith("replica") for part in system.pids())

    async def all_here() -> bool:
        return await redis.scard("rq:workers") >= replicas

    await until(all_here, "all training processes wait for jobs", START_SECONDS)


async def _watch(system: System, seconds: float, every: float, workers: int) -> dict[str, Any]:
    redis, series = connect(system.redis_url), defaultdict(list)
    await _all_trainers(redis, system)
    load = Load(system.url, (model.MODEL,), workers=workers, seed=1)
    running = asyncio.create_task(load.run())
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        await asyncio.sleep(every)
        await _sample(system, redis, series, time.monotonic() - started)
    load.stop()
    await running
    await asyncio.to_thread(system.await_drained)
    await redis.aclose()
    return {"series": series, "outcomes": dict(load.counts())}


def slope(points: list[tuple[float, float]], seconds: float) -> dict[str, float] | None:
    """Growth an hour with its 95 % interval; None for too few points."""
    late = [p for p in points if p[0] >= seconds * WARMING]
    if len(late) < 5:
        return None
    times, values = zip(*late, strict=True)
    if len(set(values)) == 1:
        return {"per_hour": 0.0, "low": 0.0, "high": 0.0, "last": values[-1]}
    fit = stats.linregress([t / 3600 for t in times], values)
    margin = stats.t.ppf(0.975, len(late) - 2) * fit.stderr
    return {
        "per_hour": round(fit.slope, 3),
        "low": round(fit.slope - margin, 3),
        "high": round(fit.slope + margin, 3),
        "last": round(values[-1], 2),
    }


def grows(name: str, found: dict[str, float]) -> bool:
    """Whether it surely grows by more than is allowed; bounded streams may fill to their bound."""
    if name.startswith("stream "):
        live = (":requests:", ":batches", ":replies:", ":control")
        return any(part in name for part in live) and found["last"] > 1000
    return bool(found["low"] > ALLOWED_AN_HOUR[name.split()[0]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--workers", type=int, default=3, help="clients")
    options = parser.parse_args()
    seconds = options.minutes * 60
    variables = {
        "COLLM_REPLICA_DTYPE": "float32",
        "COLLM_REPLICA_THREADS": "1",
        "COLLM_REPLICA_METRICS_KEPT": "5000",
        "COLLM_DISPATCHER_DECISIONS_KEPT": "1000",
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint = model.write(folder / model.MODEL)
        arguments = ["--model", str(checkpoint), "--served-model-name", model.MODEL]
        with System(folder / "data", *arguments, variables=variables) as system:
            found = asyncio.run(_watch(system, seconds, options.every, options.workers))
            report = judged(found, seconds)
            # Told before the stop: half an hour's result does not hang on it.
            print(json.dumps({"minutes": options.minutes, **report}), flush=True)
            system.stop(seconds=STOP_SECONDS)
    return 0 if report["soak"] == "flat" else 1


def judged(found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Slopes of all series, and whether any surely grows or any request failed."""
    slopes = {n: s for n, p in found["series"].items() if (s := slope(p, seconds)) is not None}
    growing = sorted(n for n, s in slopes.items() if grows(n, s))
    flat = not growing and set(found["outcomes"]) <= {"answered", "left"}
    return {
        "soak": "flat" if flat else "grows",
        "outcomes": found["outcomes"],
        "growing": growing,
        "slopes": dict(sorted(slopes.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
