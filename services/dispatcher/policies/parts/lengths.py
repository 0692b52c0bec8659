"""How long an answer will be: a quantile of recent outputs of the same stream.

A stream is an adapter (or the base). Until ``KNOWN`` outputs were seen the prior holds. Where
answers usually run to their limit (``max_tokens`` is the length, as in a forced replay) the limit
is the prediction.
"""

from __future__ import annotations

from collections import deque

from services.dispatcher.policies.base import Completion, Request

KNOWN = 50  # outputs after which the quantile replaces the prior
WINDOW = 400  # outputs remembered a stream
REFRESH = 25  # outputs between two computations of the quantile
LIMIT_SHARE = 0.8  # share of answers that ended at their limit, above which the limit is taken
SMOOTHING = 0.02


class Lengths:
    """Prediction of output tokens. ``quantile`` of recent outputs, ``prior`` before those."""

    def __init__(self, prior: float = 128.0, quantile: float = 0.8) -> None:
        self._prior, self._quantile = prior, quantile
        self._streams: dict[str | None, _Stream] = {}
        self._all = _Stream()

    @property
    def known(self) -> bool:
        """Whether enough outputs were seen to refuse a request on an estimate."""
        return self._all.count >= KNOWN

    def expect(self, request: Request) -> float:
        """Output tokens that the request will probably need, at most its max_tokens."""
        stream = self._streams.get(request.adapter, self._all)
        if stream.count < KNOWN:
            stream = self._all
        limit = float(request.max_tokens)
        if stream.at_limit > LIMIT_SHARE:
            return limit
        if stream.count < KNOWN:
            return min(limit, self._prior)
        return max(1.0, min(limit, stream.quantile))

    def mean(self) -> float:
        """Mean output over all streams; the prior until there are enough."""
        return self._all.mean if self._all.count >= KNOWN else self._prior

    def learn(self, request: Request, completion: Completion) -> None:
        """An answer ended by itself or at its limit."""
        if completion.output_tokens < 1 or completion.reason not in ("stop", "length"):
            return
        stream = self._streams.get(request.adapter)
        if stream is None:
            stream = self._streams[request.adapter] = _Stream()
        at_limit = completion.reason == "length"
        for each in (stream, self._all):
            each.add(completion.output_tokens, at_limit, self._quantile)


class _Stream:
    __slots__ = ("at_limit", "count", "mean", "outputs", "quantile")

    def __init__(self) -> None:
        self.outputs: deque[int] = deque(maxlen=WINDOW)
        self.count = 0
        self.quantile = 0.0
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
