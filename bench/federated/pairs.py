"""The coordinator against fixed (B, b), each on a fresh system under the same seeded arrivals.

Every way is measured for the same seconds, counted from its first round's beginning; runs of
different ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.federated import measures
from bench.federated.system import Answered, NothingHappened, System, open_loop, system

COORDINATOR = "coordinator"


def run(
    o: argparse.Namespace,
    domains: Mapping[str, Path],
    options: Callable[..., dict[str, Any]],
    prompts: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """``options(**changes)`` are the training options of the system."""
    ways: list[Any] = [COORDINATOR]
    ways += [tuple(int(x) for x in pair.split("/")) for pair in o.pairs.split(",")]
    runs: dict[Any, list[dict[str, Any]]] = {way: [] for way in ways}
    for repeat in range(o.repeats):
        turn = ways[repeat % len(ways) :] + ways[: repeat % len(ways)]
        for way in turn:
            fixed = {} if way == COORDINATOR else {"micro_batch": way[0], "concurrency": way[1]}
            with system(o.model, options(max_rounds=500, **fixed), slo_seconds=o.slo) as running:
                found = under_load(o, running, domains, prompts)
            say(json.dumps({"pair": way, **found}))
            runs[way].append(found)
    without_version(list(runs.values()))
    target = target_of(list(runs.values()))
    points = [point(way, found, target) for way, found in runs.items()]
    return {
        "coordinator_vs_fixed": points,
        "target_heldout": target,
        "dominated_by": dominating(points),
    }


def under_load(
    o: argparse.Namespace, running: System, domains: Mapping[str, Path], prompts: Sequence[str]
) -> dict[str, Any]:
    """Requests for the adapter at ``--rate`` while the replicas learn, for ``--pair-seconds``."""
    running.add_data(domains)
    began = running.wait("round_began", 1, o.patience)
    answers: list[Answered] = []

    async def ask() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(o.pair_seconds, stop.set)
        answers.extend(
            await open_loop(running.url, "bench", list(prompts), o.rate, stop, o.answer_tokens)
        )

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    started = time.monotonic()
    thread.start()
    thread.join()
    seconds = time.monotonic() - started
    with contextlib.suppress(NothingHappened):  # then this way has no completion time
        running.wait("round_done", 1, 1.0)
    found = measures.rounds(running)
    return {
        **measures.q_goodput(answers, running.versions(), o.slo, seconds),
        "rounds_done": len(found),
        "batches": [r["batches"] for r in running.events("round_began")],
        "curve": curve(found, float(began[0]["at"])),
    }


def curve(found: Sequence[Mapping[str, Any]], begun: float) -> list[tuple[float, float]]:
    """(seconds since the first round began, mean held-out loss), from the parent's on."""
    known = [f for f in found if f["heldout"] is not None]
    if not known:
        return []
    first = [(0.0, known[0]["heldout_before"])] if known[0]["heldout_before"] is not None else []
    return [*first, *((round(f["at"] - begun, 2), f["heldout"]) for f in known)]


def without_version(runs: Sequence[Sequence[dict[str, Any]]]) -> None:
    """A run that finished no round served what every run began with: its quality is known."""
    started = [r["curve"][0][1] for way in runs for r in way if r["curve"]]
    for run in (r for way in runs for r in way):
        if run["q_goodput"] is None and not run["curve"] and started:
            run["q_goodput"] = round(run["goodput"] / started[0], 4)


def target_of(runs: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    """The lowest loss that every run with a round to its end reached; None without any."""
    least = [min(y for _, y in r["curve"]) for way in runs for r in way if r["curve"]]
    return max(least, default=None)


def joint_time(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Seconds until the loss was at ``target``, linear between two rounds' ends."""
    before: tuple[float, float] | None = None
    for at, loss in points:
        if loss <= target:
            if before is None or before[1] <= loss:
                return at
            share = (before[1] - target) / (before[1] - loss)
            return round(before[0] + share * (at - before[0]), 2)
        before = (at, loss)
    return None


def point(way: Any, found: Sequence[Mapping[str, Any]], target: float | None) -> dict[str, Any]:
    """Medians over a way's runs, and what each run had."""
    times = [None if target is None else joint_time(f["curve"], target) for f in found]
    return {
        "pair": way,
        "q_goodput": _median([f["q_goodput"] for f in found]),
        "jct": _median(times),
        "attainment": _median([f["attainment"] for f in found]),
        "rounds_done": [f["rounds_done"] for f in found],
        "last_heldout": [f["curve"][-1][1] if f["curve"] else None for f in found],
        "runs": [
            {"q_goodput": f["q_goodput"], "jct": t, "batches": f["batches"], "curve": f["curve"]}
            for f, t in zip(found, times, strict=True)
        ],
    }


def dominating(points: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Fixed pairs that are no worse than the coordinator on both axes, and better on one.

    Who never reached the target took longer than anyone who did.
    """

    def axes(p: Mapping[str, Any]) -> tuple[float, float]:
        return (math.inf if p["jct"] is None else p["jct"]), -(p["q_goodput"] or 0.0)

    mine = axes(next(p for p in points if p["pair"] == COORDINATOR))
    return [
        p["pair"]
        for p in points
        if p["pair"] != COORDINATOR
        and axes(p) != mine
        and all(theirs <= ours for theirs, ours in zip(axes(p), mine, strict=True))
    ]


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(statistics.median(known), 4) if len(known) == len(values) and known else None
