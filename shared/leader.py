"""A service of which one process acts: stands by, acts while it holds the lease, starts anew.

The frame of dispatcher, launcher and coordinator: lease, status page, restarts after what passes
by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.clock import RedisClock
from shared.lease import TRY_SECONDS, Lease, LeaseLost, is_fenced
from shared.redis_client import TRANSIENT, Backoff, connect, is_missing_group, stand_ready
from shared.status_server import StatusServer

log = logging.getLogger(__name__)

RED_AFTER = 10.0  # seconds without a sign of life from the acting loop


class Acting:
    """What a service's loop works with while it holds the lease.

    ``starting``: what it does before its first turn; None when it is ready from the start.
    """

    def __init__(
        self, redis: Redis, lease: Lease, clock: RedisClock, starting: str | None = None
    ) -> None:
        self.redis, self.lease, self.clock = redis, lease, clock
        self.progress, self.starting = time.monotonic(), starting

    def alive(self) -> None:
        """Called by the loop each turn."""
        self.progress, self.starting = time.monotonic(), None


Act = Callable[[Acting], Awaitable[None]]


class Leader:
    """``run`` until ``stop``. ``act`` runs for ever; what passes by itself starts it anew.

    ``red_after``: seconds without a turn of its loop. ``starting``: why it is not ready before
    the first one, see ``Acting``.
    """

    def __init__(
        self,
        role: str,
        redis_url: str,
        registry: CollectorRegistry,
        host: str,
        port: int,
        act: Act,
        *,
        red_after: float = RED_AFTER,
        starting: str | None = None,
    ) -> None:
        self._role, self._act = role, act
        self._red_after, self._starting = red_after, starting
        self._host, self._port = host, port
        self._redis: Redis = connect(redis_url)
        self._lease = Lease(self._redis, role)
        self._status = StatusServer(registry, self.live, self.ready)
        self._acting: Acting | None = None
        self._trouble: str | None = "starting"
        self._main: asyncio.Task[None] | None = None
        self.port = 0

    async def run(self) -> None:
        """Raises OSError when the status port is taken."""
        self.port = await self._status.start(self._host, self._port)
        self._main = asyncio.create_task(self._serve(), name=self._role)
        try:
            await self._main
        except asyncio.CancelledError:
            log.info("stopped")
        finally:
            await self._lease.release()
            await self._status.stop()
            await self._redis.aclose()

    def stop(self) -> None:
        """The lease goes back, so that a standby acts at once."""
        if self._main is not None:
            self._main.cancel()

    async def _serve(self) -> None:
        backoff = Backoff()
        while True:
            started = time.monotonic()
            try:
                await self._once()
            except* (LeaseLost, RedisError, *TRANSIENT) as group:
                error = first(group)
                if not _passes(error):
                    raise
                self._trouble = f"{type(error).__name__}: {error}"
                log.warning("starts anew: %s", self._trouble)
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            finally:
                self._acting = None
            if time.monotonic() - started > self._red_after:
                backoff.reset()
            await backoff.wait()

    async def _once(self) -> None:
        while not await self._lease.try_acquire():
            self._trouble = None  # a healthy standby
            await asyncio.sleep(TRY_SECONDS)
        await stand_ready(self._redis)
        clock = RedisClock()
        await clock.synchronise(self._redis)
        self._acting = Acting(self._redis, self._lease, clock, self._starting)
        self._trouble = None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lease.keep(), name="lease")
            group.create_task(self._synchronise(clock), name="clock")
            group.create_task(self._run(self._acting), name="act")

    async def _run(self, acting: Acting) -> None:
        await self._act(acting)
        raise RuntimeError(f"{self._role}: the acting loop ended")

    async def _synchronise(self, clock: RedisClock) -> None:
        while True:
            await asyncio.sleep(5.0)
            await clock.synchronise(self._redis)

    def live(self) -> str | None:
        """Red when the loop has stopped turning."""
        acting = self._acting
        silent = 0.0 if acting is None else time.monotonic() - acting.progress
        return f"no turn of the loop for {silent:.1f} s" if silent > self._red_after else None

    def ready(self) -> str | None:
        """Red, too, while Redis or the lease makes trouble; a standby is ready."""
        if self._acting is not None and self._acting.starting is not None:
            return self._acting.starting
        return self._trouble or self.live()


def first(group: BaseException) -> BaseException:
    """The first real error of a group of groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _passes(error: BaseException) -> bool:
    """Whether a new start cures it: Redis away or empty, the lease elsewhere."""
    if isinstance(error, (LeaseLost, *TRANSIENT)):
        return True
    return isinstance(error, RedisError) and (is_fenced(error) or is_missing_group(error))
