"""What is asked of one model, measured where every request passes: for launcher and coordinator.

Pure: arrivals, releases and completions with their time in, ``shared.demand.ModelDemand`` out.
"""

from __future__ import annotations

import math
from collections import deque

from services.dispatcher.policies.base import Request
from services.dispatcher.policies.parts.outflow import Outflow
from shared.demand import ModelDemand

SECONDS = 60  # of arrivals that are remembered, one bin a second
DECAY = 0.1  # a second
WAITS = 500  # releases over which the p95 of the wait is taken
LEAST_SHARE = 0.05  # of recent requests that must name an objective before it counts
SMOOTHING = 0.02
LIMITS_MAX = 256  # different end-to-end limits whose lengths are kept


class DemandMeter:
    """Books of one model. Times in Redis seconds, lengths in tokens."""

    def __init__(self) -> None:
        self.outflow = Outflow()  # of what has reached a replica's stream
        self._bins: dict[int, int] = {}
        # (time, end-to-end limit, TPOT, prompt tokens) of recent requests
        self._slos: deque[tuple[float, float | None, float | None, int]] = deque(maxlen=2000)
        self._output_under: dict[float, float] = {}  # end-to-end limit -> mean output tokens
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
        self._slos.append((now, _limit(request), request.tpot, request.prompt_tokens))

    def released(self, request: Request, now: float) -> None:
        """It left for a replica."""
        self._waits.append(max(0.0, now - request.arrival))

    def answered(self, request: Request, output_tokens: int) -> None:
        """It left its replica with this many tokens."""
        if output_tokens <= 0:
            return
        old = self._output or float(output_tokens)
        self._output = old + SMOOTHING * (output_tokens - old)
        limit = _limit(request)
        if limit is not None and (limit in self._output_under or self._room()):
            known = self._output_under.get(limit, float(output_tokens))
            self._output_under[limit] = known + SMOOTHING * (output_tokens - known)

    def _room(self) -> bool:
        """Whether a further limit may be remembered; those no longer asked for make room."""
        if len(self._output_under) >= LIMITS_MAX:
            asked = {e2e for _, e2e, _, _ in self._slos}
            self._output_under = {k: v for k, v in self._output_under.items() if k in asked}
        return len(self._output_under) < LIMITS_MAX

    def summary(self, now: float) -> ModelDemand:
        """The demand of the last minute."""
        self._forget(now)
        counts = self._counts(now)
        weights = [math.exp(-DECAY * age) for age in range(len(counts) - 1, -1, -1)]
        total = sum(weights) or 1.0
        rate = sum(w * c for w, c in zip(weights, counts, strict=True)) / total
        waits = sorted(self._waits)
        slo = _strictest([e2e for _, e2e, _, _ in self._slos])
        prompts = [p for _, e2e, _, p in self._slos if slo is not None and e2e == slo]
        return ModelDemand(
            rate=rate,
            prompt=self._prompt,
            output=self._output,
            slo=slo,
            tpot=_strictest([tpot for _, _, tpot, _ in self._slos]),
            limited_prompt=sum(prompts) / len(prompts) if prompts else 0.0,
            limited_output=0.0 if slo is None else self._output_under.get(slo, 0.0),
            wait_p95=waits[int(0.95 * (len(waits) - 1))] if waits else 0.0,
            released=self.outflow.rate(now),
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


def _limit(request: Request) -> float | None:
    """Its end-to-end limit in seconds, to the millisecond."""
    if request.deadline is None:
        return None
    return round(request.deadline - request.arrival, 3)


def _strictest(limits: list[float | None]) -> float | None:
    """The lowest limit that at least ``LEAST_SHARE`` of the requests are under."""
    named = sorted(x for x in limits if x is not None)
    rank = int(LEAST_SHARE * len(limits))
    return named[rank] if len(named) > rank else None
