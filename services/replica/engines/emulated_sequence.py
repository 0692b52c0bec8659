"""One request in the emulated engine."""

from __future__ import annotations

from services.replica.merging import Adapter
from shared.lifetime import Stamp
from shared.messages import Finished, Generate, Output


class Sequence:
    """One request in the engine. Token counts. ``order``: its place among all that came."""

    __slots__ = (
        "delivered",
        "key",
        "length",
        "order",
        "request",
        "reserved",
        "stamps",
        "to_prefill",
        "version",
    )

    def __init__(
        self, request: Generate, length: int, key: int, version: str | None, order: int
    ) -> None:
        self.request = request
        self.length = length
        self.key = key
        self.version = version
        self.order = order
        self.delivered = len(request.generated)
        self.to_prefill = len(request.prompt) + self.delivered
        self.reserved = len(request.prompt) + request.sampling.max_tokens
        self.stamps: dict[str, float] = {}

    @property
    def adapter(self) -> Adapter:
        """What would be merged for it: versions are different weights. None: no adapter."""
        name = self.request.adapter
        return None if name is None else (name, self.version)

    def deliver(self, words: tuple[int, ...]) -> Output:
        """Its next token, with the reason for which it is the last if it is."""
        request, offset = self.request, self.delivered
        token = words[(self.key + offset) % len(words)]
        self.delivered += 1
        reason = None
        if self.delivered >= self.length:
            reason = "length" if self.delivered >= request.sampling.max_tokens else "stop"
        return Output(
            id=request.id,
            attempt=request.attempt,
            offset=offset,
            tokens=(token,),
            finish=reason,
            adapter_version=self.version,
            stamps=self.stamps if reason else {},
        )

    def finished(self, reason: str) -> Finished:
        request, stamps = self.request, self.stamps
        return Finished(
            *(request.id, request.attempt, len(request.prompt), self.delivered, reason),
            started=stamps.get(Stamp.STARTED, 0.0),
            first_token=stamps.get(Stamp.FIRST_TOKEN, 0.0),
        )
