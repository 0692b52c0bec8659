"""One request in the emulated engine."""

from __future__ import annotations

from shared.messages import Generate


class Sequence:
    """One request in the engine. Token counts."""

    __slots__ = (
        "delivered",
        "key",
        "length",
        "request",
        "reserved",
        "stamps",
        "to_prefill",
        "version",
    )

    def __init__(self, request: Generate, length: int, key: int, version: str | None) -> None:
        self.request = request
        self.length = length
        self.key = key
        self.version = version
        self.delivered = len(request.generated)
        self.to_prefill = len(request.prompt) + self.delivered
        self.reserved = len(request.prompt) + request.sampling.max_tokens
        self.stamps: dict[str, float] = {}
