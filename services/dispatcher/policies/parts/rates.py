"""Arrival rate: EWMA of arrivals a second plus a burst margin."""

from __future__ import annotations

FLOOR = 1.0 / 60.0  # requests a second; below it nothing is worth a decision
SMOOTHING = 0.2  # weight of a new second
BURST_DEVIATIONS = 1.0  # standard deviations of the count a second that the margin covers


class ArrivalRate:
    """Counts arrivals and the work they bring (replica seconds) in one-second bins."""

    def __init__(self) -> None:
        self._bin: float | None = None
        self._count = 0
        self._work = 0.0
        self.mean = 0.0
        self._square = 0.0
        self.work = 0.0  # replica seconds a second
        self._warm = 0

    def arrived(self, work: float) -> None:
        self._count += 1
        self._work += work

    def tick(self, now: float) -> None:
        """Close the bins up to ``now``; called about once a second."""
        if self._bin is None:
            self._bin = now
            return
        elapsed = now - self._bin
        if elapsed < 0.5:
            return
        rate, work = self._count / elapsed, self._work / elapsed
        self._warm += 1
        weight = max(SMOOTHING, 1.0 / self._warm)
        keep = (1 - weight) ** max(1.0, elapsed)
        self.mean = keep * self.mean + (1 - keep) * rate
        self._square = keep * self._square + (1 - keep) * rate * rate
        self.work = keep * self.work + (1 - keep) * work
        self._bin, self._count, self._work = now, 0, 0.0

    @property
    def margin(self) -> float:
        """Factor for bursts: 1 + deviation / mean, at most 3."""
        if self.mean <= 0:
            return 1.0
        deviation = max(0.0, self._square - self.mean**2) ** 0.5
        return float(min(3.0, 1.0 + BURST_DEVIATIONS * deviation / self.mean))

    @property
    def expected(self) -> float:
        """Requests a second to be ready for."""
        return max(FLOOR, self.mean * self.margin)
