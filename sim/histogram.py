"""Latencies in constant memory: counts in bins that grow by one percent."""

from __future__ import annotations

import math

STEPS = 100.0  # bins a factor of e: neighbouring bins differ by one percent
LOWEST = 1e-5  # seconds
BINS = int(math.log(1e6 / LOWEST) * STEPS)


class Histogram:
    """Seconds from 10 us to 10^6 s; a percentile is right to one percent."""

    __slots__ = ("counts", "number", "total")

    def __init__(self) -> None:
        self.counts = [0] * (BINS + 1)
        self.number = 0
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.number += 1
        self.total += seconds
        if seconds <= LOWEST:
            self.counts[0] += 1
        else:
            self.counts[min(BINS, 1 + int(math.log(seconds / LOWEST) * STEPS))] += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.number if self.number else None

    def percentile(self, share: float) -> float | None:
        """The value below which ``share`` (0 to 1) of the values lie; None when empty.

        Between two values it is interpolated, as numpy and so the load generator do: of a hundred
        values the 99th percentile is not the largest.
        """
        if not self.number:
            return None
        position = share * (self.number - 1)
        rank = int(position)
        lower = self._value(rank)
        upper = lower if rank == position else self._value(rank + 1)
        return lower + (position - rank) * (upper - lower)

    def _value(self, rank: int) -> float:
        """The value of this rank, the smallest has 0."""
        seen = 0
        for k, count in enumerate(self.counts):
            seen += count
            if seen > rank:
                return LOWEST * math.exp((k - 0.5) / STEPS) if k else LOWEST
        raise IndexError(f"rank {rank} of {self.number} values")
