"""How far an emulated engine's steps end behind their schedule: the measure of a valid run."""

from __future__ import annotations

from collections import deque

WINDOW = 2000  # steps


class LagMeter:
    """Relative lag of the last steps: (actual end - scheduled end) / duration."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=WINDOW)
        self._fresh = 0
        self._p99 = 0.0

    def add(self, late: float, duration: float) -> None:
        """One step of ``duration`` seconds that ended ``late`` seconds after its time."""
        self._lags.append(max(0.0, late) / duration)
        self._fresh += 1

    def p99(self) -> float:
        """99th percentile over the window; sorted anew only when steps have been added."""
        if self._fresh and self._lags:
            ordered = sorted(self._lags)
            self._p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
            self._fresh = 0
        return self._p99
