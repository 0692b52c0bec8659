"""A lease with fencing tokens: of several equal processes one acts, the others stand by.

The holder's id lies under ``lease:<role>`` and expires; each grant draws a new token from
``fence:<role>``. Every write that must not come from a former holder checks the token inside
its Lua script (``FENCE_CHECK``), so a holder that was stopped for a while and wakes up late
writes nothing. Tokens follow Redis time in milliseconds, so they keep growing even after Redis
has lost its data.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket

from redis.asyncio import Redis

from shared import names
from shared.redis_client import TRANSIENT, patiently

log = logging.getLogger(__name__)

TTL_MS = 2000
RENEW_SECONDS = 0.5
TRY_SECONDS = 0.4  # how often a standby looks; TTL + this bounds the takeover

# First lines of a fenced script: KEYS[1] is the fence key, ARGV[1] the caller's token.
FENCE_CHECK = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED') end"

_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {0, holder} end
local time = redis.call('TIME')
local token = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if token <= last then token = last + 1 end
local text = string.format('%.0f', token)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, text}
"""

_RENEW = """
if redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class LeaseLost(RuntimeError):
    """Another process holds the lease now, or Redis no longer knows this holder's token."""


def is_fenced(error: Exception) -> bool:
    """Whether a script refused because its caller no longer holds the lease."""
    return "FENCED" in str(error)


class Lease:
    """The lease of one role. One object a process; not shared between tasks that acquire."""

    def __init__(self, redis: Redis, role: str, *, ttl_ms: int = TTL_MS) -> None:
        self._redis = redis
        self.role = role
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.token = ""  # "" while not held
        self._ttl_ms = ttl_ms
        self._keys = (names.lease(role), names.fence(role))

    @property
    def fence_key(self) -> str:
        """KEYS[1] of scripts that begin with ``FENCE_CHECK``; ARGV[1] is ``token``."""
        return self._keys[1]

    async def try_acquire(self) -> bool:
        """Take the lease if it is free; False while another process holds it."""
        granted, text = await self._redis.eval(_ACQUIRE, 2, *self._keys, self.holder, self._ttl_ms)
        if not granted:
            return False
        self.token = text.decode()
        log.info("holds the lease %r with token %s", self.role, self.token)
        return True

    async def renew(self) -> bool:
        """Extend the lease; False when a newer token exists or ours was lost."""
        reply = await self._redis.eval(
            _RENEW, 2, *self._keys, self.holder, self._ttl_ms, self.token
        )
        return bool(reply)

    async def keep(self) -> None:
        """Renew for ever; raises LeaseLost when somebody else acts now."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            if not await patiently(self.renew, f"lease {self.role!r}"):
                self.token = ""
                raise LeaseLost(f"the lease {self.role!r} went to another process")

    async def release(self) -> None:
        """Give the lease back, so that a standby acts at once. Silent when Redis is away."""
        self.token = ""
        try:
            await self._redis.eval(_RELEASE, 1, self._keys[0], self.holder)
        except TRANSIENT as e:
            log.warning("lease %r not given back, it expires by itself: %s", self.role, e)
