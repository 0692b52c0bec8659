"""Following streams without a group: every reader sees every entry after its start.

For ``metrics`` and ``events``: a sample that is missed is missed, none is ever owed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable

from redis.asyncio import Redis

from shared.redis_client import BLOCK_MS, TRANSIENT, Backoff, patiently

log = logging.getLogger(__name__)

Fields = dict[bytes, bytes]


async def follow(
    redis: Redis, streams: Iterable[str], *, since: str = "", count: int = 1000
) -> AsyncIterator[tuple[str, str, Fields]]:
    """(stream, entry id, fields) for ever; waits out a Redis that is away.

    ``since`` is an entry id to begin after; "" = only what comes from now on.
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
        for raw, entries in found or ():
            stream = raw.decode()
            for entry_id, fields in entries:
                cursors[stream] = entry_id.decode()
                if fields is not None:
                    yield stream, entry_id.decode(), fields
