"""Sums by time slice with a bound on how many slices are kept."""

from __future__ import annotations

import math
from collections import defaultdict

Sums = dict[str, float]


class Buckets:
    """Named sums in slices of ``width`` seconds; the newest ``keep`` slices stay."""

    def __init__(self, width: float, keep: int) -> None:
        self.width, self._keep = width, keep
        self._slices: dict[int, Sums] = {}
        self._newest = -1

    def __len__(self) -> int:
        return len(self._slices)

    @property
    def first(self) -> float | None:
        """Start of the oldest slice, seconds; None without any."""
        return min(self._slices) * self.width if self._slices else None

    def add(self, time: float, **values: float) -> None:
        """Add to the slice of ``time`` (seconds); what is older than the oldest kept is dropped."""
        index = math.floor(time / self.width)
        if index <= self._newest - self._keep:
            return
        if index > self._newest:
            self._newest = index
            for old in [i for i in self._slices if i <= index - self._keep]:
                del self._slices[old]
        sums = self._slices.setdefault(index, defaultdict(float))
        for name, value in values.items():
            sums[name] += value

    def grouped(self, start: float, end: float, points: int) -> list[tuple[float, float, Sums]]:
        """(start, seconds, sums) of at most about ``points`` groups that lie between the two.

        A group that is not over yet at ``end`` is left out: its sums would read as a fall.
        """
        per = max(1, math.ceil((end - start) / self.width / points))
        first = math.ceil(start / self.width / per)
        last = math.floor(end / self.width / per)
        found = []
        for group in range(first, last):
            total: Sums = defaultdict(float)
            for index in range(group * per, (group + 1) * per):
                for name, value in self._slices.get(index, {}).items():
                    total[name] += value
            found.append((group * per * self.width, per * self.width, total))
        return found
