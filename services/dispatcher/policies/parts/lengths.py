"""How long an answer will be: a quantile of recent outputs of the same stream.

A stream is an adapter (or the base) with one SLO class, that is, with about the same latency
limits: who asks for other limits asks for other answers. A stream of which too little is known yet
goes by its adapter's answers, an adapter by all. Until ``KNOWN`` outputs were seen the prior holds.
Where answers usually run to their limit (``max_tokens`` is the length, as in a forced replay) the
limit is the prediction.
"""

from __future__ import annotations

import math
from collections import deque

from services.dispatcher.policies.base import Completion, Request

KNOWN = 50  # outputs after which the quantile replaces the prior
WINDOW = 400  # outputs remembered a stream
REFRESH = 25  # outputs between two computations of the quantile
LIMIT_SHARE = 0.8  # share of answers that ended at their limit, above which the limit is taken
SMOOTHING = 0.02
SHORT_SHARE = 0.1  # of answers that are shorter than the lower of their bounds
LONG_SHARE = 0.02  # of answers that are longer than the upper one
STREAMS_MAX = 256  # SLO classes told apart; what comes after goes by its adapter

Stream = tuple[str | None, int, int, int]  # adapter; end-to-end, TTFT and TPOT limit, coarsely


class Lengths:
    """Prediction of output tokens. ``quantile`` of recent outputs, ``prior`` before those."""

    def __init__(self, prior: float = 128.0, quantile: float = 0.8) -> None:
        self._prior, self._quantile = prior, quantile
        self._streams: dict[Stream, _Stream] = {}
        self._adapters: dict[str | None, _Stream] = {}
        self._all = _Stream()

    @property
    def known(self) -> bool:
        """Whether enough outputs were seen to refuse a request on an estimate."""
        return self._all.count >= KNOWN

    def expect(self, request: Request) -> float:
        """Output tokens that the request will probably need, at most its max_tokens."""
        return self.forecast(request)[1]

    def forecast(self, request: Request) -> tuple[float, float, float]:
        """Output tokens that it will have at any rate, probably need, and hardly exceed."""
        stream, limit = self._of(request), float(request.max_tokens)
        if stream.at_limit > LIMIT_SHARE:
            least = limit if stream.count >= KNOWN else min(limit, SHORT_SHARE * self._prior)
            return least, limit, limit
        if stream.count < KNOWN:
            return min(limit, SHORT_SHARE * self._prior), min(limit, self._prior), limit
        least, likely, most = stream.short, stream.quantile, stream.long
        return (
            max(1.0, least if least < limit else limit),
            max(1.0, likely if likely < limit else limit),
            max(1.0, most if most < limit else limit),
        )

    def _of(self, request: Request) -> _Stream:
        """The narrowest stream of which enough is known."""
        stream = self._streams.get(_stream(request))
        if stream is None or stream.count < KNOWN:
            stream = self._adapters.get(request.adapter, self._all)
        return self._all if stream.count < KNOWN else stream

    def mean(self) -> float:
        """Mean output over all streams; the prior until there are enough."""
        return self._all.mean if self._all.count >= KNOWN else self._prior

    def learn(self, request: Request, completion: Completion) -> None:
        """An answer ended by itself or at its limit."""
        if completion.output_tokens < 1 or completion.reason not in ("stop", "length"):
            return
        at_limit = completion.reason == "length"
        for each in (self._all, *self._kept(request)):
            each.add(completion.output_tokens, at_limit, self._quantile)

    def _kept(self, request: Request) -> list[_Stream]:
        """Its adapter's stream, and that of its limits if there is room for another one."""
        adapter, key = self._adapters.get(request.adapter), _stream(request)
        if adapter is None:
            adapter = self._adapters[request.adapter] = _Stream()
        stream = self._streams.get(key)
        if stream is None and len(self._streams) < STREAMS_MAX:
            stream = self._streams[key] = _Stream()
        return [adapter] if stream is None else [adapter, stream]


def _stream(request: Request) -> Stream:
    arrival, end, first = request.arrival, request.deadline, request.ttft_deadline
    return (
        request.adapter,
        0 if end is None else _class(end - arrival),
        0 if first is None else _class(first - arrival),
        0 if request.tpot is None else _class(request.tpot),
    )


def _class(limit: float) -> int:
    """Limits of which one is less than 1.4 times the other are mostly one class. 0 is no limit."""
    return 100 + round(2 * math.log2(min(max(limit, 1e-6), 1e6)))


class _Stream:
    __slots__ = ("at_limit", "count", "long", "mean", "outputs", "quantile", "short")

    def __init__(self) -> None:
        self.outputs: deque[int] = deque(maxlen=WINDOW)
        self.count = 0
        self.quantile = self.short = self.long = 0.0
        self.mean = 0.0
        self.at_limit = 1.0  # so that before anything is known the limit is believed

    def add(self, tokens: int, at_limit: bool, quantile: float) -> None:
        self.outputs.append(tokens)
        self.count += 1
        weight = max(SMOOTHING, 1.0 / self.count)
        self.mean += weight * (tokens - self.mean)
        self.at_limit += weight * (float(at_limit) - self.at_limit)
        if self.count % REFRESH == 0 or self.count == KNOWN:
            ordered = sorted(self.outputs)
            self.quantile = float(ordered[min(len(ordered) - 1, int(quantile * len(ordered)))])
            self.short = float(ordered[int(SHORT_SHARE * len(ordered))])
            self.long = float(ordered[int((1 - LONG_SHARE) * len(ordered))])
