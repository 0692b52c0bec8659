"""The gateway as a whole: its parts, its background tasks, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from services.gateway import app, errors
from services.gateway.access import Access
from services.gateway.answer import Choice
from services.gateway.catalogue import Catalogue
from services.gateway.cors import Cors
from services.gateway.desk import Desk
from services.gateway.feedback import Memory
from services.gateway.file_routes import Files
from services.gateway.fine_tuning import FineTuning
from services.gateway.front import Front
from services.gateway.generation import Generation
from services.gateway.inbox import Inbox
from services.gateway.limits import Limits
from services.gateway.lora import Adapters
from services.gateway.metrics import Metrics
from services.gateway.outbox import Outbox
from services.gateway.reconcile import Reconciler
from services.gateway.responses import Responses
from services.gateway.settings import GatewaySettings
from services.gateway.storage import Storage
from services.gateway.tracing import Handler, tracer
from shared import names
from shared.clock import RedisClock
from shared.dead_letters import write
from shared.entries import request_values
from shared.jobs import Jobs
from shared.records import HEARTBEAT_SECONDS, HEARTBEAT_TTL_MS
from shared.redis_client import TRANSIENT, connect, patiently, stand_ready

log = logging.getLogger(__name__)

CLOCK_SECONDS = 10.0
AWAY_CHECK_SECONDS = 0.25


class Gateway:
    """One gateway process. ``asgi`` is what uvicorn serves; ``running`` surrounds its life."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.id = settings.name or f"gateway-{os.urandom(4).hex()}"
        self.redis: Redis = connect(settings.redis_url)
        self.clock = RedisClock()
        self.metrics = Metrics()
        self.stopping = False
        self._away_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.catalogue = Catalogue(self.redis, settings.models)
        self.outbox = Outbox(
            self.redis,
            queue_limit=settings.queue_limit,
            retry_after=settings.retry_after,
            released=lambda model: self.catalogue.now.released.get(model, 0.0),
            on_refused=lambda: self.metrics.rejected("queue_full"),
            on_unknown=self._redis_is_away,
        )
        self.desk = Desk(
            self.outbox,
            self.metrics,
            self.clock,
            max_attempts=settings.max_attempts,
            timeout=settings.request_timeout,
            on_dead_letter=self._dead_letter,
        )
        self.metrics.in_flight = self.desk.counts
        self.inbox = Inbox(
            self.redis,
            self.id,
            self.desk.receive,
            on_away=self._redis_is_away,
            on_back=self._redis_is_back,
        )
        self.reconciler = Reconciler(
            self.redis,
            self.id,
            self.desk,
            self.inbox,
            self.clock,
            unsent=self.outbox.unsent,
            stale_after=settings.stale_after,
        )
        self.access = Access(settings.api_keys_file)
        self.limits = Limits(self.redis, settings.limits, settings.tenants, settings.redis_wait)
        self.memory = Memory(self.redis)
        self.generation = Generation(self)
        self.jobs = Jobs(self.redis)
        self.storage = Storage(self.redis, self.jobs, settings)
        self.adapters = Adapters(self)
        self.files = Files(self)
        self.fine_tuning = FineTuning(self)
        self.tracer = tracer(settings, self.id, self.clock)
        routes: dict[str, Handler] = {
            "/v1/chat/completions": self.generation.chat,
            "/v1/completions": self.generation.completion,
            "/v1/responses": Responses(self).create,
        }
        if self.tracer is not None:
            routes = {path: self.tracer.traced(h) for path, h in routes.items()}
        self.asgi = Front(
            routes,
            app.build(self),
            self.metrics,
            self.access,
            Cors(settings.cors_origins),
            settings.admin_port,
        )

    # ------------------------------------------------------------ life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start everything; at the end say goodbye to Redis. Called by the ASGI lifespan."""
        await patiently(lambda: stand_ready(self.redis), "the gateway's start")
        await patiently(self._announce, "the gateway's start")
        await patiently(lambda: self.clock.synchronise(self.redis), "the clock")
        await patiently(self.catalogue.refresh, "the catalogue")
        for work in (
            self.outbox.run(),
            self.inbox.run(),
            self.catalogue.run(),
            self.desk.sweep(),
            self.reconciler.run(),
            self._heartbeat(),
            self._keep_time(),
            self._bound_absence(),
            self.access.watch(),
            *([] if self.limits.none else [self.limits.run()]),
            self.fine_tuning.run(),
        ):
            self._start(work)
        try:
            yield
        finally:
            self.stopping = True
            await self._stop()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A background task never ends by itself: if one does, nothing works any more."""
        self._tasks.remove(task)
        if not task.cancelled() and task.exception() is not None and not self.stopping:
            log.critical("a background task failed; the gateway stops", exc_info=task.exception())
            os.kill(os.getpid(), 15)

    async def _stop(self) -> None:
        try:
            async with asyncio.timeout(2.0):
                await self.outbox.flushed()  # the cancels of clients that are still there
                await self.limits.flush()
                await self.memory.close()
                await self.redis.delete(names.gateway_alive(self.id), names.replies(self.id))
                await self.redis.srem(names.GATEWAYS, self.id)
        except (TimeoutError, *TRANSIENT) as e:
            log.warning("Redis was not told of the end (%s); the heartbeat expires", e)
        await self.fine_tuning.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.shutdown)
        await self.redis.aclose()

    # ------------------------------------------------------------ background

    async def _announce(self) -> None:
        pipe = self.redis.pipeline(transaction=False)
        pipe.set(names.gateway_alive(self.id), "1", px=HEARTBEAT_TTL_MS)
        pipe.sadd(names.GATEWAYS, self.id)
        await pipe.execute()

    async def _heartbeat(self) -> None:
        while True:
            try:
                await self._announce()
            except TRANSIENT as e:
                log.debug("heartbeat not written: %s", e)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            try:
                await self.clock.synchronise(self.redis)
            except TRANSIENT as e:
                log.debug("clock not synchronised: %s", e)

    def _redis_is_away(self) -> None:
        if self._away_since is None:
            self._away_since = asyncio.get_running_loop().time()
        if self.inbox.connected:  # a write failed, the reader has noticed nothing
            self.reconciler.request()
            self._away_since = None

    def _redis_is_back(self) -> None:
        self.outbox.redis_is_back()
        if self._away_since is None:
            return  # the first answer after the start: nothing can have been lost
        log.info("Redis is back")
        self._away_since = None
        self.reconciler.request()

    async def _bound_absence(self) -> None:
        """Requests wait for Redis, but not for ever."""
        while True:
            await asyncio.sleep(AWAY_CHECK_SECONDS)
            since = self._away_since
            wait = self.settings.redis_wait
            if since is not None and asyncio.get_running_loop().time() - since > wait:
                self.desk.fail_all(
                    errors.unavailable(f"Redis is away for more than {wait:g} s", 5.0)
                )

    def _dead_letter(self, choice: Choice, why: str) -> None:
        self._start(self._write_dead_letter(choice, why))

    async def _write_dead_letter(self, choice: Choice, why: str) -> None:
        values = request_values(choice.request)
        fields = {str(k): v for k, v in zip(values[::2], values[1::2], strict=True)}
        stream = names.requests(choice.request.model)
        await patiently(
            lambda: write(self.redis, stream, fields, why, by=self.id),
            "a dead letter",
            give_up_after=self.settings.redis_wait,
        )

    # ------------------------------------------------------------ what others ask

    def health(self) -> dict[str, Any]:
        """Red ("status": "unavailable") when Redis or every replica is gone."""
        now = self.catalogue.now
        models = {
            name: {
                "replicas": dict(now.replicas.get(name, {})),
                "emulated": model.card.emulated,
            }
            for name, model in now.models.items()
        }
        answering = any(now.alive(name) for name in now.models)
        good = self.inbox.connected and answering
        return {
            "status": "ok" if good else "unavailable",
            "gateway": self.id,
            "redis": self.inbox.connected,
            "models": models,
        }

    async def look_at_streams(self) -> None:
        """Lengths of the streams this gateway writes and reads, for the next scrape; series of
        models that are served no more disappear."""
        self.metrics.retain({*self.catalogue.now.models, *self.catalogue.now.unusable})
        streams = [names.replies(self.id), *map(names.requests, self.catalogue.now.models)]
        pipe = self.redis.pipeline(transaction=False)
        for stream in streams:
            pipe.xlen(stream)
        try:
            self.metrics.streams = dict(zip(streams, await pipe.execute(), strict=True))
        except TRANSIENT:
            self.metrics.streams = {}
