"""A request's life as stamps, and every latency derived from them (one definition each).

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


Stamps = Mapping[str, float]


def _between(stamps: Stamps, start: Stamp, end: Stamp) -> float | None:
    if start in stamps and end in stamps:
        return stamps[end] - stamps[start]
    return None


def ttft(stamps: Stamps) -> float | None:
    """Time to first token, seconds."""
    return _between(stamps, Stamp.RECEIVED, Stamp.FIRST_TOKEN)


def e2e(stamps: Stamps) -> float | None:
    """Arrival to last token, seconds."""
    return _between(stamps, Stamp.RECEIVED, Stamp.FINISHED)


def tpot(stamps: Stamps, output_tokens: int) -> float | None:
    """Time per output token after the first, seconds; None for fewer than two tokens."""
    if output_tokens < 2:
        return None
    span = _between(stamps, Stamp.FIRST_TOKEN, Stamp.FINISHED)
    return None if span is None else span / (output_tokens - 1)


def wait(stamps: Stamps) -> float | None:
    """Arrival to release into a replica's stream, seconds."""
    return _between(stamps, Stamp.RECEIVED, Stamp.RELEASED)
