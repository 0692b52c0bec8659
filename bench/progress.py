"""How far a long run is: n of m, and how long the rest takes if it goes on as it has."""

from __future__ import annotations

from collections.abc import Sequence


class Progress:
    """Told of every part that ends. ``sizes``: what the parts cost in comparison."""

    def __init__(self, sizes: Sequence[float]) -> None:
        self._count, self._ended = len(sizes), 0
        self._left = sum(sizes)
        self._size = self._seconds = 0.0  # of parts that were timed

    def skipped(self, size: float = 1.0) -> None:
        """A part that was known already."""
        self._ended += 1
        self._left -= size

    def took(self, seconds: float, size: float = 1.0) -> None:
        """A part that took so long."""
        self.skipped(size)
        self._size += size
        self._seconds += seconds

    def __str__(self) -> str:
        done = f"{self._ended} of {self._count}"
        if self._ended >= self._count:
            return done
        if self._size <= 0:
            return f"{done}, nothing timed yet"
        return f"{done}, about {spoken(max(0.0, self._left) * self._seconds / self._size)} left"


def spoken(seconds: float) -> str:
    """A length of time, to two figures or so."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
