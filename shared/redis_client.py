"""Connections to Redis with the settings this system needs.

redis-py's defaults retry a command ten times after a socket timeout: one XADD becomes two
entries. Here a command is sent once; whoever can repeat it safely does so with ``patiently``.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import unquote

import redis as redis_sync
from redis.asyncio import Redis, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from shared.redis_connection import send_promptly

log = logging.getLogger(__name__)

BLOCK_MS = 1000  # how long a blocking read waits; well below SOCKET_TIMEOUT
SOCKET_TIMEOUT = 10.0  # seconds
STANDING = 8  # connections a service opens at its start: more than it has used at once

# What passes by itself: Redis restarting, loading its file, failing over, at its memory limit.
TRANSIENT = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    OSError,
)

T = TypeVar("T")


def connect(url: str, *, max_connections: int = 64) -> Redis:
    """A client for ``redis://``, ``rediss://``, ``unix://`` or ``redis+sentinel://`` URLs.

    ``redis+sentinel://[user:password@]host:port[,host:port]/service[/db]`` follows a Sentinel's
    primary. Values come back as bytes. Raises ValueError on another scheme.
    """
    options = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": 5.0,
        "socket_keepalive": True,
        "health_check_interval": 0,
        "max_connections": max_connections,
    }
    if url.startswith("redis+sentinel://"):
        return _sentinel(url.removeprefix("redis+sentinel://"), options)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(
            f"Redis URL {url.split('@')[-1]!r}: redis://, rediss://, unix:// or "
            "redis+sentinel:// expected"
        )
    if url.startswith("unix://"):
        options.pop("socket_keepalive")
    client: Redis = Redis.from_url(url, **options)
    send_promptly(client)
    return client


async def stand_ready(client: Redis, connections: int = STANDING) -> None:
    """Open so many connections at once: none is opened later, while a request waits for it.

    And a process then holds as many from its first minute to its last. Raises the errors of
    ``TRANSIENT``.
    """
    pool, opened = client.connection_pool, []
    try:
        for _ in range(connections):
            opened.append(await pool.get_connection())
    finally:
        for connection in opened:
            await pool.release(connection)


def connect_sync(url: str, *, socket_timeout: float = SOCKET_TIMEOUT) -> redis_sync.Redis:
    """A blocking client (rq needs one) for the URLs of ``connect``, sent-once like it."""
    options: dict[str, object] = {
        "retry": redis_sync.retry.Retry(NoBackoff(), 0),
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": 5.0,
        "health_check_interval": 0,
    }
    if url.startswith("redis+sentinel://"):
        pairs, service, more = _parse_sentinel(url.removeprefix("redis+sentinel://"))
        sentinel = redis_sync.Sentinel(pairs, socket_timeout=5.0)
        client: redis_sync.Redis = sentinel.master_for(service, **{**options, **more})
        return client
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(
            f"Redis URL {url.split('@')[-1]!r}: redis://, rediss://, unix:// or "
            "redis+sentinel:// expected"
        )
    plain: redis_sync.Redis = redis_sync.Redis.from_url(url, **options)
    return plain


def _sentinel(rest: str, options: dict[str, object]) -> Redis:
    pairs, service, more = _parse_sentinel(rest)
    sentinel = Sentinel(pairs, socket_timeout=5.0, retry=Retry(NoBackoff(), 0))
    client: Redis = sentinel.master_for(service, **{**options, **more})
    send_promptly(client)
    return client


def _parse_sentinel(rest: str) -> tuple[list[tuple[str, int]], str, dict[str, object]]:
    """Hosts, service and connection options of a Sentinel URL without its scheme."""
    options: dict[str, object] = {}
    credentials, _, rest = rest.rpartition("@")
    hosts, _, path = rest.partition("/")
    service, _, db = path.partition("/")
    if not service:
        raise ValueError("redis+sentinel:// URL names no service: …//host:port/service")
    pairs = []
    for host in hosts.split(","):
        name, _, port = host.partition(":")
        pairs.append((name, int(port or 26379)))
    if credentials:
        user, _, password = credentials.partition(":")
        options["username"], options["password"] = user or None, unquote(password) or None
    if db:
        options["db"] = int(db)
    return pairs, service, options


class Backoff:
    """Exponential waiting with jitter: 0.05 s doubling to ``longest`` seconds; reset on success."""

    def __init__(self, first: float = 0.05, longest: float = 2.0) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        self._next = self._first

    async def wait(self) -> None:
        delay = self._next * random.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._longest)
        await asyncio.sleep(delay)


async def patiently(
    operation: Callable[[], Awaitable[T]], what: str, *, give_up_after: float | None = None
) -> T:
    """Run an idempotent operation until Redis answers; logs the first failure.

    ``give_up_after`` seconds bounds the waiting (the last error is raised); None waits until
    the task is cancelled, which is what a service's main loop wants.
    """
    backoff, started, told = Backoff(), asyncio.get_running_loop().time(), False
    while True:
        try:
            return await operation()
        except TRANSIENT as e:
            waited = asyncio.get_running_loop().time() - started
            if give_up_after is not None and waited > give_up_after:
                raise
            if not told:
                log.warning("Redis is away (%s: %s); %s waits", type(e).__name__, e, what)
                told = True
            await backoff.wait()


async def ensure_group(redis: Redis, stream: str, group: str) -> None:
    """Create a consumer group that starts at the stream's beginning, if there is none."""
    try:
        await redis.xgroup_create(stream, group, id="0", mkstream=True)
    except ResponseError as e:
        if "BUSYGROUP" not in str(e):
            raise


def is_missing_group(error: Exception) -> bool:
    """Whether a command failed because its group or stream was lost (Redis came back empty).

    A read that waits when the stream goes is told so in other words up to Redis 7.0 (UNBLOCKED).
    """
    said = str(error)
    return isinstance(error, ResponseError) and ("NOGROUP" in said or said.startswith("UNBLOCKED"))
