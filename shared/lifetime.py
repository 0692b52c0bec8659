"""A request's life as stamps, and the time per token derived from them.

Stamps are seconds of Redis time (see ``shared.clock``), so that they can be compared across
hosts. Source of the method: DistServe, vidur. TPOT excludes the first token, as in
``vllm bench serve``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Stamp(StrEnum):
    """The moments of a request, in order."""

    RECEIVED = "received"  # the gateway has the whole HTTP request
    QUEUED = "queued"  # the dispatcher has read it from the request stream
    RELEASED = "released"  # the dispatcher has put it into a replica's stream
    STARTED = "started"  # the engine has given it KV memory and begun its prefill
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"  # its last token was computed


def tpot(stamps: Mapping[str, float], output_tokens: int) -> float | None:
    """Time per output token after the first, seconds; None for fewer than two tokens."""
    first, last = stamps.get(Stamp.FIRST_TOKEN), stamps.get(Stamp.FINISHED)
    if output_tokens < 2 or first is None or last is None:
        return None
    return (last - first) / (output_tokens - 1)
