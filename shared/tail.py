"""Following streams without a group: every reader sees every entry after its start.

For ``metrics`` and ``events``: a sample that is missed is missed, none is ever owed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

from redis.asyncio import Redis

from shared.messages import BODY, DecodeError, Message, decode_any
from shared.redis_client import BLOCK_MS, TRANSIENT, Backoff, patiently

log = logging.getLogger(__name__)

Fields = dict[bytes, bytes]


async def just_before(redis: Redis) -> str:
    """The entry id after which all that is written from now on comes."""
    seconds, micros = await redis.time()
    return f"{seconds * 1000 + micros // 1000 - 1}-0"


async def follow(
    redis: Redis,
    streams: Iterable[str],
    *,
    since: str = "",
    count: int = 1000,
    gather: float = 0.0,
) -> AsyncIterator[tuple[str, str, Fields]]:
    """(stream, entry id, fields) for ever; waits out a Redis that is away.

    ``since`` is an entry id to begin after; "" = only what comes from now on. ``gather``: seconds
    between two reads in which entries may gather, for readers that are in no hurry: waking for
    each entry costs many times what reading it costs. Whoever lags behind does not wait.
    """
    if not since:
        seconds, micros = await patiently(redis.time, "reading of streams")
        since = f"{seconds * 1000 + micros // 1000}-0"
    cursors = dict.fromkeys(streams, since)
    backoff = Backoff()
    while True:
        try:
            found = await redis.xread(dict(cursors), count=count, block=BLOCK_MS)
        except TRANSIENT as e:
            log.warning("Redis is away (%s: %s); reading of streams waits", type(e).__name__, e)
            await backoff.wait()
            continue
        backoff.reset()
        full = False
        for raw, entries in found or ():
            stream, full = raw.decode(), full or len(entries) >= count
            for entry_id, fields in entries:
                cursors[stream] = entry_id.decode()
                if fields is not None:
                    yield stream, entry_id.decode(), fields
        if gather and not full:
            await asyncio.sleep(gather)


class SampleReader:
    """Samples of the metrics stream; of damaged ones the first is told, all are passed over."""

    def __init__(self) -> None:
        self._told = False

    def read(self, entry_id: str, fields: Fields) -> Message | None:
        """The sample of an entry; None when it cannot be read."""
        try:
            return decode_any(fields.get(BODY, b""))
        except DecodeError as e:
            if not self._told:
                log.error("sample %s cannot be read: %s", entry_id, e)
                self._told = True
            return None
