"""A replica that was drained comes back when somebody wants it: ``collm undrain``."""

from __future__ import annotations

import asyncio
import contextlib

from redis.exceptions import RedisError

from shared import names
from shared.redis_client import TRANSIENT, connect

LOOK_SECONDS = 0.5


async def asked_back(redis_url: str, replica: str) -> None:
    """Return when the replica is wanted again; the wish is taken, so that it counts once."""
    async with connect(redis_url) as redis:
        while True:
            with contextlib.suppress(*TRANSIENT, RedisError):  # Redis away: asked again
                if await redis.getdel(names.replica_wanted(replica)):
                    return
            await asyncio.sleep(LOOK_SECONDS)
