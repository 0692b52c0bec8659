"""Serving and training beside one another: a grid without yielding, a half load with it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.sharing.rig import Answer, Rig, until

PROMPT = 64  # tokens
OUTPUT = 64
FOREVER = 1_000_000  # steps


def trained(rig: Rig, micro_steps: int) -> None:
    """Wait until that many more micro-steps are done."""
    wanted = rig.block.micro_steps + micro_steps
    until(lambda: rig.block.micro_steps >= wanted, "training", 300)


# ---------------------------------------------------------------- grid


def grid(
    rig: Rig, parent: str, bs: Sequence[int], Bs: Sequence[int], seconds: float
) -> list[dict[str, float]]:
    """Median decode iteration and micro-step for each (b, B); b = 0 and B = 0 are solo runs."""
    rng, cells = random.Random(0), []
    for B in Bs:
        job = None
        if B:
            job = rig.round(parent, steps=FOREVER, micro_batches=(B,), accumulation=8)
            trained(rig, 2)
        for b in (0, *bs) if B else bs:
            cells.append(_cell(rig, rng, b, B, seconds))
        if job is not None:
            rig.stop(job)
    return cells


def _cell(rig: Rig, rng: random.Random, b: int, B: int, seconds: float) -> dict[str, float]:
    ids: list[str] = []
    if b:
        ids = rig.submit(rig.prompts(rng, b, PROMPT), 1500)
        until(lambda: rig.block.running == b and rig.block.waiting == 0, "batch", 60)
        until(lambda: all(rig.answers[i].tokens for i in ids), "prefill", 60)
    rig.samples()
    steps, train, tokens = _counters(rig)
    begun = time.monotonic()
    while time.monotonic() < begun + seconds or (B and rig.block.micro_steps < steps + 3):
        time.sleep(0.02)
        if time.monotonic() > begun + 10 * seconds:
            break
    samples, _ = rig.samples()
    done, spent, learnt = _counters(rig)
    if ids:
        rig.cancel(ids)
    decode = [s.seconds / s.steps for s in samples if s.b == b and not s.prefill_tokens]
    return {
        "b": b,
        "B": B,
        "t_infer": statistics.median(decode) if decode else 0.0,
        "t_train": (spent - train) / (done - steps) if done > steps else 0.0,
        "train_tokens_s": (learnt - tokens) / (time.monotonic() - begun),
    }


def _counters(rig: Rig) -> tuple[int, float, int]:
    return rig.block.micro_steps, rig.block.train_seconds, rig.block.train_tokens


def fit(cells: Sequence[dict[str, float]], target: str, names: Sequence[str]) -> dict[str, Any]:
    """Least squares of ``target`` on the named variables and a constant, with R squared."""
    used = [c for c in cells if c[target] > 0]
    y = np.array([c[target] for c in used])
    x = np.array([[c[n] for n in names] + [1.0] for c in used])
    coefficients, *_ = np.linalg.lstsq(x, y, rcond=None)
    residual = float(((y - x @ coefficients) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    return {"coefficients": coefficients.tolist(), "r2": 1 - residual / total if total else 1.0}


# ---------------------------------------------------------------- half load


def saturation(rig: Rig, b: int) -> float:
    """Requests per second that the replica answers with ``b`` of them at all times."""
    rng = random.Random(1)
    rig.wait(rig.submit(rig.prompts(rng, 4, PROMPT), 8))
    begun = time.monotonic()
    rig.wait(rig.submit(rig.prompts(rng, b, PROMPT), OUTPUT))
    return b / (time.monotonic() - begun)


def offered(rig: Rig, rate: float, seconds: float, seed: int) -> list[Answer]:
    """Poisson arrivals at ``rate`` per second for ``seconds``; returns when all are answered."""
    rng = random.Random(seed)
    ids: list[str] = []
    due = begun = time.monotonic()
    while due < begun + seconds:
        due += rng.expovariate(rate)
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
        ids += rig.submit(rig.prompts(rng, 1, PROMPT), OUTPUT)
    return rig.wait(ids)


def p99_tpot(answers: Sequence[Answer]) -> float:
    return float(np.percentile([a.tpot for a in answers if a.tpot is not None], 99))


def half_load(rig: Rig, parent: str, *, B: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Serving at half of saturation without and with training, in turn, yielding on."""
    rate = 0.5 * saturation(rig, 32)
    alone: list[Answer] = []
    beside: list[Answer] = []
    solo: list[float] = []
    fraction: list[float] = []
    ratios: list[float] = []
    for repeat in range(repeats):
        without = offered(rig, rate, seconds, repeat)
        job = rig.round(parent, steps=FOREVER, micro_batches=(B,), accumulation=8)
        trained(rig, 1)
        solo.append(_speed(rig, lambda: trained(rig, 16)))
        found: list[Answer] = []

        def serve(into: list[Answer] = found, seed: int = repeat) -> None:
            into += offered(rig, rate, seconds, seed)

        fraction.append(_speed(rig, serve) / solo[-1])
        rig.stop(job)
        ratios.append(p99_tpot(found) / p99_tpot(without))
        alone += without
        beside += found
    return {
        "rate": rate,
        "tpot_p99_alone_ms": 1e3 * p99_tpot(alone),
        "tpot_p99_beside_ms": 1e3 * p99_tpot(beside),
        "tpot_p99_ratio": p99_tpot(beside) / p99_tpot(alone),
        "tpot_p99_ratios": ratios,
        "solo_tokens_s": statistics.median(solo),
        "train_speed_fraction": statistics.median(fraction),
        "train_speed_fractions": fraction,
        "requests": len(alone),
    }


def _speed(rig: Rig, block: Any) -> float:
    """Training tokens per second while ``block`` runs."""
    tokens, begun = rig.block.train_tokens, time.monotonic()
    block()
    return (rig.block.train_tokens - tokens) / (time.monotonic() - begun)
