"""How fast a queue empties, measured where requests leave it."""

from __future__ import annotations

SECONDS = 30  # that are looked back at, one bin a second


class Outflow:
    """Requests that left of late. Times in seconds."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}  # second -> requests, in order of time

    def left(self, count: int, now: float) -> None:
        """So many left for a replica."""
        second = int(now)
        self._bins[second] = self._bins.get(second, 0) + count
        self._forget(second)

    def rate(self, now: float) -> float:
        """Requests a second since the first of them; 0 while none has left."""
        self._forget(int(now))
        if not self._bins:
            return 0.0
        return sum(self._bins.values()) / max(1.0, now - next(iter(self._bins)))

    def _forget(self, second: int) -> None:
        while self._bins and (oldest := next(iter(self._bins))) < second - SECONDS:
            del self._bins[oldest]
