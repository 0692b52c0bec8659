"""Federated fine-tuning measured: ``python -m bench.federated --data FOLDER``.

Parts (``--parts``, comma-separated):
  strategies  held-out loss of base, solo and federated adapters after the same number of steps
  system      collm up with three replicas: idle to first step, overhead of a round, blobs
  fit         the latency fit on one replica, every pair (b, B) predicted from the others
  gloo        the same over a process group
  pairs       the coordinator against fixed (B, b) under load: Q-goodput and time to a target loss
``--data`` holds ``code``, ``roleplay`` and ``tools`` as .jsonl: the clients' private data; without
it simple chats are made up. Plots go to ``--out``; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.federated import fitting, lab, made, measures, pairs, plots
from bench.federated.system import system
from collm import models
from shared import training_data
from shared.rounds import STRATEGIES

LOADED_FOR = 5.0  # seconds of load that make the cluster busy before data comes
PARTS = ("strategies", "system", "gloo", "fit", "pairs")


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
    """Three replicas learn; the way from idle to the first step, and where rounds spend time.

    The data comes while requests are served; the cluster is idle when those end.
    """
    options = training_options(o, max_rounds=o.system_rounds)
    with system(o.model, options, exchange="redis") as running:
        with running.loaded(asked(domains), 2.0, o.answer_tokens):
            time.sleep(LOADED_FOR)
            running.add_data(domains)
            running.wait_prepared(o.patience)
        running.wait("first_step", 1, o.patience)
        first = measures.first_step(running)
        say(f"first step: {first}")
        running.wait("round_done", o.system_rounds, o.patience * o.system_rounds)
        found = measures.rounds(running)
    plots.overhead(found, o.out)
    return {
        "idle_to_first_step_s": first["from_idle"],
        "first_step": first,
        "round_overhead": median([r["overhead"] for r in found]),
        "breakdown": [plots.breakdown(r) for r in found],
        "rounds": found,
        "exchange": {"redis": measures.exchange(found)},
    }


def prediction(o: argparse.Namespace, domains: Mapping[str, Path]) -> dict[str, Any]:
    """T_infer on a grid of (b, B) of one replica: each pair predicted from the others."""
    folder, data = models.resolve(o.model).path, next(iter(domains.values()))
    bs, Bs = _numbers(o.fit_b), _numbers(o.fit_B)
    steps = fitting.grid(folder, data, bs, Bs, o.fit_seconds, o.max_tokens, say)
    fitted = measures.fit_error(steps)
    plots.prediction(fitted["pairs"], o.out)
    return {"fit_median_error": fitted["median_error"], "fit": fitted}


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def over_group(o: argparse.Namespace, domains: Mapping[str, Path]) -> dict[str, Any]:
    """The exchange through Gloo instead of Redis."""
    with system(o.model, training_options(o), exchange="group") as running:
        running.add_data(domains)
        running.wait("round_done", o.system_rounds, o.patience * (o.system_rounds + 1))
        found = measures.rounds(running)
    over = [r for r in found if r["exchange"] == "gloo"]
    return {"exchange": {"gloo": measures.exchange(over)}}


def against_fixed(o: argparse.Namespace, domains: Mapping[str, Path]) -> dict[str, Any]:
    """The coordinator and fixed pairs (B, b) under the same load."""
    found = pairs.run(o, domains, partial(training_options, o), asked(domains), say)
    plots.against_fixed(found["coordinator_vs_fixed"], o.out)
    return found


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
    add("--fit-seconds", type=float, default=2.5, help="a pair (b, B)")
    add("--fit-b", default="1,2,4,8,16,24")
    add("--fit-B", default="0,1,2,4,8")
    add("--patience", type=float, default=600.0, help="seconds to wait for a round")
    add("--pairs", default="1/4,2/3,3/2,4/1", help="fixed B/b, comma-separated")
    add("--pair-seconds", type=float, default=100.0)
    add("--repeats", type=int, default=1, help="runs of each pair")
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
    todo = {
        "strategies": strategies,
        "system": whole_system,
        "gloo": over_group,
        "fit": prediction,
        "pairs": against_fixed,
    }
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
