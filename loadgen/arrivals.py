"""The schedule: when each request is due, how long it is, which adapter it asks for.

All random choices come from one seed; the same arguments give the same schedule. Gamma
intervals as in ``vllm bench serve``: shape = burstiness, 1 is Poisson, below 1 burstier.
Adapter popularity by Zipf's law as in dLoRA's generator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from loadgen.trace import Row

CHUNK = 4096  # random numbers drawn at once


class Planned(NamedTuple):
    """One request of the schedule. Seconds from the start, tokens; None: as the prompt is."""

    number: int
    due: float
    prompt_tokens: int | None
    output_tokens: int | None
    tag: str


def from_trace(
    rows: Iterator[Row],
    *,
    rate_scale: float = 1.0,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    max_prompt: int | None = None,
    max_output: int | None = None,
) -> Iterator[Planned]:
    """A trace with its time compressed ``rate_scale`` times and its lengths scaled.

    Lengths never fall below 1 token nor rise above ``max_prompt`` and ``max_output``.
    """
    for index, row in enumerate(rows):
        yield Planned(
            index,
            row.time / rate_scale,
            _scaled(row.prompt_tokens, prompt_scale, max_prompt),
            _scaled(row.output_tokens, output_scale, max_output),
            row.tag,
        )


def _scaled(tokens: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if limit is None else min(scaled, limit)


def gamma(
    rate: float,
    burstiness: float,
    seed: int,
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    tag: str = "",
) -> Iterator[Planned]:
    """Endless arrivals at ``rate`` a second (inf: all at once)."""
    if math.isinf(rate):
        for index in itertools.count():
            yield Planned(index, 0.0, prompt_tokens, output_tokens, tag)
    random = np.random.default_rng(seed)
    index, due = 0, 0.0
    while True:
        for gap in random.gamma(burstiness, 1.0 / (rate * burstiness), CHUNK).tolist():
            due += gap
            yield Planned(index, due, prompt_tokens, output_tokens, tag)
            index += 1


def limited(
    schedule: Iterator[Planned], *, limit: int | None = None, duration: float | None = None
) -> Iterator[Planned]:
    """The first ``limit`` requests of those due within ``duration`` seconds."""
    if duration is not None:
        schedule = itertools.takewhile(lambda planned: planned.due <= duration, schedule)
    return schedule if limit is None else itertools.islice(schedule, limit)


def assign(names: Sequence[str], how: str, seed: int, *, exponent: float = 1.0) -> Iterator[str]:
    """Endless model names for the requests: "random", "round-robin" or "zipf".

    Zipf: the k-th name (in the order given) has a share proportional to 1 / k^exponent.
    """
    if how == "round-robin":
        yield from itertools.cycle(names)
    ranks = np.arange(1, len(names) + 1, dtype=float)
    weights = ranks**-exponent if how == "zipf" else np.ones(len(names))
    random = np.random.default_rng([seed, 1])
    while True:
        for k in random.choice(len(names), size=CHUNK, p=weights / weights.sum()).tolist():
            yield names[k]
