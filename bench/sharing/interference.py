"""Serving and training beside one another: a grid without yielding, a half load with it."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


def tpot(answers: Sequence[Answer], percent: float) -> float:
    return float(np.percentile([a.tpot for a in answers if a.tpot is not None], percent))


@dataclass(frozen=True)
class Use:
    """What a stretch of time was used for, as parts of it. ``*_cores``: of all compute slots."""

    train_tokens_s: float
    serving_steps: float  # time inside engine steps
    serving_cores: float
    training_cores: float
    training_waits: float
    b: float  # sequences in a step, mean
    steps_s: float


class _Meter:
    """Reads the control block's counters when made and again at ``use``."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        rig.samples()
        self._begun, self._first = time.monotonic(), self._read()

    def _read(self) -> dict[str, float]:
        block = self._rig.block
        names = (
            *("train_tokens", "busy_seconds", "slot_seconds", "steps"),
            *("train_slot_seconds", "train_wait_seconds"),
        )
        return {name: float(getattr(block, name)) for name in names}

    def use(self) -> Use:
        seconds, now = time.monotonic() - self._begun, self._read()
        rate = {name: (now[name] - self._first[name]) / seconds for name in now}
        samples, _ = self._rig.samples()
        steps = sum(s.steps for s in samples)
        slots = len(os.sched_getaffinity(0))
        return Use(
            train_tokens_s=rate["train_tokens"],
            serving_steps=rate["busy_seconds"],
            serving_cores=rate["slot_seconds"] / slots,
            training_cores=rate["train_slot_seconds"] / slots,
            training_waits=rate["train_wait_seconds"],
            b=sum(s.b * s.steps for s in samples) / steps if steps else 0.0,
            steps_s=rate["steps"],
        )


def half_load(rig: Rig, parent: str, *, B: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Serving at half of saturation without and with training, in turn, yielding on."""
    rate = 0.5 * saturation(rig, 32)
    runs = [_pair_of_runs(rig, parent, B, rate, seconds, seed) for seed in range(repeats)]
    alone = [answer for run in runs for answer in run.alone]
    beside = [answer for run in runs for answer in run.beside]
    fractions = [run.use.train_tokens_s / run.solo for run in runs]
    found: dict[str, Any] = {"rate": rate, "requests": len(alone)}
    for percent in (50, 99):
        before, after = tpot(alone, percent), tpot(beside, percent)
        found[f"tpot_p{percent}_alone_ms"] = 1e3 * before
        found[f"tpot_p{percent}_beside_ms"] = 1e3 * after
        found[f"tpot_p{percent}_ratio"] = after / before
    return found | {
        "tpot_p99_ratios": [tpot(r.beside, 99) / tpot(r.alone, 99) for r in runs],
        "solo_tokens_s": statistics.median(run.solo for run in runs),
        "train_speed_fraction": statistics.median(fractions),
        "train_speed_fractions": fractions,
        "use_alone": asdict(runs[-1].use_alone),
        "use_beside": asdict(runs[-1].use),
    }


@dataclass(frozen=True)
class _Pair:
    """The same requests without and with training."""

    alone: list[Answer]
    use_alone: Use
    solo: float  # tokens/s of training without requests
    beside: list[Answer]
    use: Use


def _pair_of_runs(rig: Rig, parent: str, B: int, rate: float, seconds: float, seed: int) -> _Pair:
    meter = _Meter(rig)
    alone = offered(rig, rate, seconds, seed)
    use_alone = meter.use()
    job = rig.round(parent, steps=FOREVER, micro_batches=(B,), accumulation=8)
    trained(rig, 1)
    meter = _Meter(rig)
    trained(rig, 16)
    solo = meter.use().train_tokens_s
    meter = _Meter(rig)
    beside = offered(rig, rate, seconds, seed)
    use = meter.use()
    rig.stop(job)
    return _Pair(alone, use_alone, solo, beside, use)
