"""The dispatcher process: stands by, acts while it holds the lease, starts anew on errors."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.dispatcher.active import Active
from services.dispatcher.counters import Counters
from services.dispatcher.settings import DispatcherSettings
from shared.clock import RedisClock
from shared.lease import TRY_SECONDS, Lease, LeaseLost, is_fenced
from shared.redis_client import TRANSIENT, Backoff, connect, is_missing_group
from shared.status_server import StatusServer

log = logging.getLogger(__name__)

ROLE = "dispatcher"
RED_AFTER_SECONDS = 5.0  # without a turn of the loop


class Dispatcher:
    """``run`` until ``stop`` is called."""

    def __init__(self, settings: DispatcherSettings) -> None:
        self._settings = settings
        self._redis: Redis = connect(settings.redis_url)
        self._lease = Lease(self._redis, ROLE)
        self._clock = RedisClock()
        self._counters = Counters()
        self._status = StatusServer(self._counters.registry, self.live, self.ready)
        self._active: Active | None = None
        self._trouble: str | None = "starting"
        self._main: asyncio.Task[None] | None = None
        self.port = 0  # of the status server, once it runs

    @property
    def active(self) -> Active | None:
        """The run in progress while this process holds the lease."""
        return self._active

    async def run(self) -> None:
        """Serve until ``stop``; raises OSError when the status port is taken."""
        self.port = await self._status.start(self._settings.host, self._settings.port)
        self._main = asyncio.create_task(self._serve(), name="dispatcher")
        try:
            await self._main
        except asyncio.CancelledError:
            log.info("stopped")
        finally:
            await self._lease.release()
            await self._status.stop()
            await self._redis.aclose()

    def stop(self) -> None:
        """What is queued stays queued; a standby or the next start takes over."""
        if self._main is not None:
            self._main.cancel()

    async def _serve(self) -> None:
        backoff = Backoff()
        while True:
            started = time.monotonic()
            try:
                await self._once()
            except* (LeaseLost, RedisError, *TRANSIENT) as group:
                error = _first(group)
                if not _passes(error):
                    raise
                self._trouble = f"{type(error).__name__}: {error}"
                log.warning("starts anew: %s", self._trouble)
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            finally:
                self._active = None
                self._counters.stand_by()
            if time.monotonic() - started > RED_AFTER_SECONDS:
                backoff.reset()
            await backoff.wait()

    async def _once(self) -> None:
        while not await self._lease.try_acquire():
            self._trouble = None  # a healthy standby
            await asyncio.sleep(TRY_SECONDS)
        self._counters.active.set(1)
        self._active = Active(self._redis, self._lease, self._clock, self._settings, self._counters)
        self._trouble = None
        await self._active.run()

    # ------------------------------------------------------------ health

    def live(self) -> str | None:
        """Red when the loop has stopped turning."""
        active = self._active
        if active is not None and time.monotonic() - active.progress > RED_AFTER_SECONDS:
            return f"no turn of the decision loop for {time.monotonic() - active.progress:.1f} s"
        return None

    def ready(self) -> str | None:
        """Red, too, while Redis or the lease makes trouble; a standby is ready."""
        if self._active is not None and not self._active.recovered:
            return "recovering"
        return self._trouble or self.live()


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _passes(error: BaseException) -> bool:
    """Whether a new start cures it: Redis away or empty, the lease elsewhere."""
    if isinstance(error, (LeaseLost, *TRANSIENT)):
        return True
    return isinstance(error, RedisError) and (is_fenced(error) or is_missing_group(error))
