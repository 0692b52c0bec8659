"""How long a request is under way between its client's gateway and the dispatcher, of late.

Measured at every arrival: a gateway that works through a burst delivers late, and its answers go
out as late. The way back cannot be seen from here; it is taken to be as long as the way in. So
this is the control overhead that a decision must leave for, instead of a constant.
"""

from __future__ import annotations

import bisect
from collections import deque

from services.dispatcher.policies.base import Request

REMEMBERED = 33  # arrivals
WINDOW = 2.0  # seconds; older ones say nothing of now


class PathLag:
    """Median of recent arrivals, seconds; 0 while there are none."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        self._lags: list[float] = []  # of those, in order of size

    def arrived(self, request: Request, now: float) -> None:
        """A first attempt has come straight; later ones and those put back waited elsewhere."""
        if request.attempt != 1 or not request.fresh:
            return
        if len(self._seen) == REMEMBERED:
            self._forget_oldest()
        lag = max(0.0, now - request.arrival)
        self._seen.append((now, lag))
        bisect.insort(self._lags, lag)

    def seconds(self, now: float) -> float:
        """The lag at present."""
        while self._seen and self._seen[0][0] < now - WINDOW:
            self._forget_oldest()
        return self._lags[len(self._lags) // 2] if self._lags else 0.0

    def _forget_oldest(self) -> None:
        _, lag = self._seen.popleft()
        del self._lags[bisect.bisect_left(self._lags, lag)]
