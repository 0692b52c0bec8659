"""Commands on the control streams, which are all bounded alike.

A reader deletes what it has carried out, so a stream grows only while nobody reads it: commands
to a replica that is gone must not fill Redis.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from shared.messages import BODY, Message, encode

MAXLEN = 100_000  # entries of a stream; beyond them the oldest go


def send_command(redis: Redis, stream: str, message: Message, **fields: str) -> Any:
    """Append ``message`` to ``stream``; ``fields`` are for a person who reads the stream.

    ``redis`` is a client (await the result) or a pipeline (do not).
    """
    kind = str(message.__struct_config__.tag)
    entry: dict[Any, Any] = {"kind": kind, **fields, BODY: encode(message)}
    return redis.xadd(stream, entry, maxlen=MAXLEN, approximate=True)
