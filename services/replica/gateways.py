"""Requests of a gateway that is gone: nobody will read their tokens, so their work stops."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from redis.asyncio import Redis

from shared import names

log = logging.getLogger(__name__)

LOOK_EVERY = 1.0  # seconds
GONE_AFTER = 3  # looks in a row without a heartbeat that was there before

# Reply streams of gateways that are still gone. KEYS: alive, replies, …
_REMOVE = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
"""


class GatewayWatch:
    """Remembers which gateways were seen alive; a gateway never seen is not judged."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._missing: dict[str, int] = {}  # gateways that were seen -> looks without heartbeat
        self._looked = 0.0

    async def gone(self, gateways: Iterable[str]) -> set[str]:
        """Those of ``gateways`` whose heartbeat has been lost. Looks once a second at most."""
        now = time.monotonic()
        wanted = sorted(set(gateways))
        if now - self._looked < LOOK_EVERY or not wanted:
            return set()
        self._looked = now
        alive = await self._redis.mget([names.gateway_alive(gateway) for gateway in wanted])
        self._missing = {g: n for g, n in self._missing.items() if g in wanted}
        for gateway, value in zip(wanted, alive, strict=True):
            if value is not None:
                self._missing[gateway] = 0
            elif gateway in self._missing:
                self._missing[gateway] += 1
        return {g for g, n in self._missing.items() if n >= GONE_AFTER}

    async def remove(self, gateway: str) -> None:
        """Delete the reply stream that late tokens may have made again."""
        keys = (names.gateway_alive(gateway), names.replies(gateway))
        await self._redis.eval(_REMOVE, len(keys), *keys)
        self._missing.pop(gateway, None)
