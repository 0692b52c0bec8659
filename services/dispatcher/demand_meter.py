"""What is asked of one model, measured where every request passes: for launcher and coordinator.

Pure: arrivals, releases and completions with their time in, ``shared.demand.ModelDemand`` out.
"""

from __future__ import annotations

import math
from collections import deque

from services.dispatcher.policies.base import Request
from shared.demand import ModelDemand

SECONDS = 60  # of arrivals that are remembered, one bin a second
DECAY = 0.1  # a second
WAITS = 500  # releases over which the p95 of the wait is taken
LEAST_SHARE = 0.05  # of recent requests that must name an objective before it counts
SMOOTHING = 0.02


class DemandMeter:
    """Books of one model. Times in Redis seconds, lengths in tokens."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._slos: deque[tuple[float, float | None, float | None]] = deque(maxlen=2000)
        self._waits: deque[float] = deque(maxlen=WAITS)
        self._prompt = self._output = 0.0
        self._began: int | None = None

    def arrived(self, request: Request, now: float) -> None:
        """A request was queued."""
        second = int(now)
        if self._began is None:
            self._began, self._prompt = second, float(request.prompt_tokens)
            self._output = self._output or float(request.max_tokens)
        self._bins[second] = self._bins.get(second, 0) + 1
        self._prompt += SMOOTHING * (request.prompt_tokens - self._prompt)
        e2e = None if request.deadline is None else request.deadline - request.arrival
        self._slos.append((now, e2e, request.tpot))

    def released(self, request: Request, now: float) -> None:
        """It left for a replica."""
        self._waits.append(max(0.0, now - request.arrival))

    def answered(self, output_tokens: int) -> None:
        """It left its replica with this many tokens."""
        if output_tokens > 0:
            old = self._output or float(output_tokens)
            self._output = old + SMOOTHING * (output_tokens - old)

    def summary(self, now: float) -> ModelDemand:
        """The demand of the last minute."""
        self._forget(now)
        counts = self._counts(now)
        weights = [math.exp(-DECAY * age) for age in range(len(counts) - 1, -1, -1)]
        total = sum(weights) or 1.0
        rate = sum(w * c for w, c in zip(weights, counts, strict=True)) / total
        waits = sorted(self._waits)
        return ModelDemand(
            rate=rate,
            cv=_variation(counts),
            prompt=self._prompt,
            output=self._output,
            slo=_strictest([e2e for _, e2e, _ in self._slos]),
            tpot=_strictest([tpot for _, _, tpot in self._slos]),
            wait_p95=waits[int(0.95 * (len(waits) - 1))] if waits else 0.0,
        )

    def _forget(self, now: float) -> None:
        oldest = int(now) - SECONDS
        self._bins = {second: n for second, n in self._bins.items() if second >= oldest}
        while self._slos and self._slos[0][0] < now - SECONDS:
            self._slos.popleft()

    def _counts(self, now: float) -> list[int]:
        """Arrivals a whole second, oldest first; the second in progress is left out."""
        if self._began is None:
            return []
        first = max(self._began, int(now) - SECONDS)
        return [self._bins.get(second, 0) for second in range(first, max(int(now), first + 1))]


def _variation(counts: list[int]) -> float:
    mean = sum(counts) / len(counts) if counts else 0.0
    if mean <= 0:
        return 0.0
    return math.sqrt(sum((c - mean) ** 2 for c in counts) / len(counts)) / mean


def _strictest(limits: list[float | None]) -> float | None:
    """The lowest limit that at least ``LEAST_SHARE`` of the requests are under."""
    named = sorted(x for x in limits if x is not None)
    rank = int(LEAST_SHARE * len(limits))
    return named[rank] if len(named) > rank else None
