"""Exponentially weighted windows over launcher ticks, and how long they should be.

Source: CoLLM (arXiv 2604.16400), idle detection: weights e^{-decay (t - t')} over the last T
samples, normalised. That T follows the volatility of arrivals is the paper's; the form
T0 (1 + CV) is this project's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's load over one tick, or its weighted mean over a window."""

    utilisation: float  # serving only, 0 to 1
    queued: float  # requests
    b: float  # requests decoding together
    source: str = ""  # of the utilisation; "" in a mean


class LoadWindow:
    """The last ``t_max`` ticks of one replica; cleared when its state changes."""

    def __init__(self, t_max: int, decay: float) -> None:
        self._samples: deque[Load] = deque(maxlen=t_max)
        self._decay = decay

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, load: Load) -> None:
        self._samples.append(load)

    def clear(self) -> None:
        self._samples.clear()

    def mean(self, length: int) -> Load | None:
        """Weighted mean of the last ``length`` samples, newest heaviest; None without any."""
        taken = list(self._samples)[-length:]
        if not taken:
            return None
        weights = [math.exp(-self._decay * age) for age in range(len(taken) - 1, -1, -1)]
        total = sum(weights)

        def average(values: Sequence[float]) -> float:
            return sum(w * v for w, v in zip(weights, values, strict=True)) / total

        return Load(
            utilisation=average([s.utilisation for s in taken]),
            queued=average([s.queued for s in taken]),
            b=average([s.b for s in taken]),
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The ``share``-quantile (0 to 1) by linear interpolation. Raises ValueError if empty."""
    if not values:
        raise ValueError("the quantile of no values")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def volatility(arrivals: Sequence[float]) -> float:
    """Coefficient of variation of arrivals a tick; 0 without arrivals."""
    if len(arrivals) < 2:
        return 0.0
    mean = sum(arrivals) / len(arrivals)
    if mean <= 0:
        return 0.0
    variance = sum((a - mean) ** 2 for a in arrivals) / len(arrivals)
    return math.sqrt(variance) / mean


def length(base: int, cv: float, low: int, high: int) -> int:
    """T (or T') in ticks: clip(base (1 + CV), low, high)."""
    return int(min(max(base * (1 + cv), low), high))
