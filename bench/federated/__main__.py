"""Federated fine-tuning measured: ``python -m bench.federated --data FOLDER``.

Parts (``--parts``, comma-separated):
  strategies  held-out loss of base, solo and federated adapters after the same number of steps
  system      collm up with three replicas: idle to first step, overhead of a round, blobs,
              and the latency fit under load
  gloo        the same over a process group
  pairs       the coordinator against fixed (B, b) under load: Q-goodput and time to a target loss
``--data`` holds ``code``, ``roleplay`` and ``tools`` as .jsonl: the clients' private data; without
it simple chats are made up. Plots go to ``--out``; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.federated import lab, made, measures, plots
from bench.federated.system import (
    Answered,
    NothingHappened,
    System,
    closed_loop,
    open_loop,
    system,
)
from collm import models
from shared import training_data
from shared.rounds import STRATEGIES

PARTS = ("strategies", "system", "gloo", "pairs")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def strategies(o: argparse.Namespace, domains: Mapping[str, Path]) -> dict[str, Any]:
    """Curves of every strategy and of each client alone, from one common start."""
    plan = lab.Plan(
        rounds=o.rounds,
        steps=o.steps,
        micro_batch=o.micro_batch,
        accumulation=o.accumulation,
        max_tokens=o.max_tokens,
        heldout=o.heldout,
        learning_rate=o.learning_rate,
        server_lr=o.server_lr,
    )
    folder = models.resolve(o.model).path
    with tempfile.TemporaryDirectory(prefix="collm-bench-") as scratch:
        bench = lab.Lab(folder, domains, Path(scratch), plan)
        try:
            start = bench.start()
            base = bench.heldout("")
            say(f"base: {lab.mean(base):.4f}")
            alone = {}
            for client, domain in bench.domains.items():
                alone[domain] = lab.solo(bench, client, start)
                say(f"{domain} alone: {[round(x, 4) for x in alone[domain]['curve']]}")
            found = {}
            for strategy in o.strategies.split(","):
                found[strategy] = lab.federated(bench, strategy, start)
                say(f"{strategy}: {[round(x, 4) for x in found[strategy]['curve']]}")
        finally:
            bench.close()
    plots.curves(lab.mean(base), alone, found, o.out)
    solo_mean = sum(a["curve"][-1] for a in alone.values()) / len(alone)
    return {
        "heldout_ce": {
            "base": round(lab.mean(base), 5),
            "solo_mean": round(solo_mean, 5),
            "federated": {s: round(f["curve"][-1], 5) for s, f in found.items()},
        },
        "curves": {s: [round(x, 5) for x in f["curve"]] for s, f in found.items()},
        "aggregation_error": {
            s: [round(x, 5) for x in f["aggregation_error"]] for s, f in found.items()
        },
        "steps_per_client": o.rounds * o.steps,
        "by_domain": {
            "base": base,
            "solo": {d: a["heldout"] for d, a in alone.items()},
            "federated": {s: f["heldout"] for s, f in found.items()},
        },
    }


def training_options(o: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    return {
        "local_steps": o.system_steps,
        "accumulation": o.accumulation,
        "B0": o.micro_batch,
        "B_max": o.micro_batch * 4,
        "max_tokens": o.max_tokens,
        "heldout_samples": o.heldout,
        "learning_rate": o.learning_rate,
        "max_rounds": o.system_rounds,
        **changes,
    }


def whole_system(o: argparse.Namespace, domains: Mapping[str, Path]) -> dict[str, Any]:
    """Three replicas learn; then, for the fit, requests come at several concurrencies."""
    options = training_options(o, max_rounds=o.system_rounds + 50)
    with system(o.model, options, exchange="redis") as running:
        prompts = asked(domains)
        running.add_data(domains)
        limit = o.patience
        running.wait("first_step", 1, limit)
        say(f"first step: {measures.first_step(running)}")
        done = running.wait("round_done", o.system_rounds, limit * o.system_rounds)
        say(f"{len(done)} rounds: {[r['overhead'] for r in measures.rounds(running)]}")
        quiet = measures.rounds(running)
        for b in (1, 2, 4, 8, 3, 6):
            seconds = o.fit_seconds
            asyncio.run(closed_loop(running.url, running.model, prompts, 3 * b, seconds, 48))
            say(f"concurrency {3 * b}: done")
        fitted = measures.fit_error(running.steps())
        first = measures.first_step(running)
    plots.prediction(fitted["pairs"], o.out)
    return {
        "idle_to_first_step_s": first["from_idle"],
        "first_step": first,
        "round_overhead": median([r["overhead"] for r in quiet]),
        "rounds": quiet,
        "exchange": {"redis": measures.exchange(quiet)},
        "fit_median_error": fitted["median_error"],
        "fit": fitted,
    }


def over_group(o: argparse.Namespace, domains: Mapping[str, Path]) -> dict[str, Any]:
    """The exchange through Gloo instead of Redis."""
    with system(o.model, training_options(o), exchange="group") as running:
        running.add_data(domains)
        running.wait("round_done", o.system_rounds, o.patience * (o.system_rounds + 1))
        found = measures.rounds(running)
    over = [r for r in found if r["exchange"] == "gloo"]
    return {"exchange": {"gloo": measures.exchange(over)}}


def pairs(o: argparse.Namespace, domains: Mapping[str, Path]) -> dict[str, Any]:
    """Each way of choosing (B, b) on a fresh system under the same seeded arrivals."""
    ways: list[Any] = ["coordinator"]
    ways += [tuple(int(x) for x in pair.split("/")) for pair in o.pairs.split(",")]
    points = []
    for way in ways:
        fixed = {} if way == "coordinator" else {"micro_batch": way[0], "concurrency": way[1]}
        options = training_options(o, max_rounds=500, **fixed)
        with system(o.model, options, slo_seconds=o.slo) as running:
            points.append({"pair": way, **under_load(o, running, domains)})
        say(json.dumps(points[-1]))
    # A loss that every way reached; none where one of them finished no round.
    reached = [p["last_heldout"] for p in points]
    target = None if None in reached else max(reached)
    for point in points:
        done, begun = point.pop("rounds"), point.pop("begun")
        point["jct"] = None if target is None else measures.joint_time(done, begun, target)
    plots.against_fixed(points, o.out)
    return {"coordinator_vs_fixed": points, "target_heldout": target}


def under_load(
    o: argparse.Namespace, running: System, domains: Mapping[str, Path]
) -> dict[str, Any]:
    """Requests for the adapter at ``--rate`` while the replicas learn, for ``--pair-seconds``
    and until two rounds are done (``--patience`` seconds at most)."""
    running.add_data(domains)
    began = running.wait("round_began", 1, o.patience)
    answers: list[Answered] = []
    settled = threading.Event()

    async def ask() -> None:
        stop = asyncio.Event()

        async def end() -> None:
            await asyncio.sleep(o.pair_seconds)
            await asyncio.to_thread(settled.wait)
            stop.set()

        ending = asyncio.create_task(end())
        answers.extend(
            await open_loop(running.url, "bench", asked(domains), o.rate, stop, o.answer_tokens)
        )
        await ending

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    started = time.monotonic()
    thread.start()
    with contextlib.suppress(NothingHappened):  # then the point has no completion time
        running.wait("round_done", 2, o.patience)
    settled.set()
    thread.join()
    seconds = time.monotonic() - started
    found = measures.rounds(running)
    losses = [r["heldout"] for r in found if r["heldout"] is not None]
    return {
        **measures.q_goodput(answers, running.versions(), o.slo, seconds),
        "rounds_done": len(found),
        "last_heldout": min(losses) if losses else None,
        "rounds": found,
        "begun": float(began[0]["at"]),
    }


def asked(domains: Mapping[str, Path]) -> list[str]:
    """Questions of all domains in turn, short ones."""
    lists = []
    for file in domains.values():
        chats = training_data.load(file).chats
        lists.append([str(c.messages[0]["content"])[:300] for c in chats[:200]])
    return [q for group in zip(*lists, strict=False) for q in group]


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.federated", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", type=Path, help="folder with code, roleplay, tools .jsonl; none: made chats")
    add("--model", default="SmolLM2-135M-Instruct")
    add("--parts", default=",".join(PARTS))
    add("--out", type=Path, default=Path("bench-results"))
    add("--strategies", default=",".join(STRATEGIES))
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=6, help="optimiser steps a client and round")
    add("--micro-batch", type=int, default=4)
    add("--accumulation", type=int, default=1)
    add("--max-tokens", type=int, default=160)
    add("--heldout", type=int, default=16, help="held-out samples a domain")
    add("--learning-rate", type=float, default=1e-3)
    add("--server-lr", type=float, default=3e-3)
    add("--system-steps", type=int, default=50, help="optimiser steps in the running system")
    add("--system-rounds", type=int, default=2)
    add("--fit-seconds", type=float, default=20.0)
    add("--patience", type=float, default=600.0, help="seconds to wait for a round")
    add("--pairs", default="1/4,2/3,3/2,4/1", help="fixed B/b, comma-separated")
    add("--pair-seconds", type=float, default=120.0)
    add("--rate", type=float, default=0.5, help="requests a second")
    add("--slo", type=float, default=10.0, help="seconds an answer may take")
    add("--answer-tokens", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    o = arguments()
    chosen = o.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise SystemExit(f"unknown parts: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if o.data is None:
        domains = made.write(o.out / "made-chats")
    else:
        domains = {name: o.data / f"{name}.jsonl" for name in made.DOMAINS}
    if missing := [str(p) for p in domains.values() if not p.exists()]:
        raise SystemExit(f"--data: no such files: {', '.join(missing)}")
    result: dict[str, Any] = {
        "bench": "federated",
        "model": o.model,
        "data": "made" if o.data is None else "given",
    }
    todo = {"strategies": strategies, "system": whole_system, "gloo": over_group, "pairs": pairs}
    exchange: dict[str, Any] = {}
    for part in chosen:
        say(f"== {part}")
        found = todo[part](o, domains)
        say(json.dumps(found))  # a later part that fails takes nothing with it
        exchange |= found.pop("exchange", {})
        result |= found
    if exchange:
        result["exchange"] = exchange
    print(json.dumps(result))


if __name__ == "__main__":
    main()
