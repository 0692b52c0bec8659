"""How long a request is under way between its client's gateway and the dispatcher, of late.

Measured at every arrival: a gateway that works through a burst delivers late, and its answers go
out as late. The way back cannot be seen from here; it is taken to be as long as the way in. So
this is the control overhead that a decision must leave for, instead of a constant.
"""

from __future__ import annotations

from collections import deque

from services.dispatcher.policies.base import Request

REMEMBERED = 33  # arrivals
WINDOW = 2.0  # seconds; older ones say nothing of now


class PathLag:
    """Median of recent arrivals, seconds; 0 while there are none."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._median: float | None = None

    def arrived(self, request: Request, now: float) -> None:
        """A first attempt has come straight; later ones and those put back waited elsewhere."""
        if request.attempt == 1 and request.fresh:
            self._seen.append((now, max(0.0, now - request.arrival)))
            self._median = None

    def seconds(self, now: float) -> float:
        """The lag at present."""
        seen = self._seen
        while seen and seen[0][0] < now - WINDOW:
            seen.popleft()
            self._median = None
        if self._median is None:
            lags = sorted(lag for _, lag in seen)
            self._median = lags[len(lags) // 2] if lags else 0.0
        return self._median
