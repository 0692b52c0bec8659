"""After Redis was away, or when a request is silent for long: does any stream still hold it?

A request lies in exactly one stream at a time, so one that is neither in its model's request
stream, nor in a replica's batches, nor answered in the reply stream, is lost and goes out again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.gateway.answer import Choice
from services.gateway.desk import Desk
from services.gateway.inbox import Inbox, stream_id
from services.gateway.outbox import Attempt
from shared import names
from shared.messages import BODY, Batch, DecodeError, Generate, decode
from shared.redis_client import TRANSIENT, Backoff

log = logging.getLogger(__name__)

PAGE = 500
CATCH_UP_SECONDS = 5.0
STALE_CHECK_SECONDS = 5.0


class Reconciler:
    """Runs when asked (``request``), and looks for silent requests by itself."""

    def __init__(
        self,
        redis: Redis,
        gateway: str,
        desk: Desk,
        inbox: Inbox,
        clock: Callable[[], float],
        *,
        unsent: Callable[[], Iterable[Attempt]],
        stale_after: float,
    ) -> None:
        """``unsent``: requests that have not gone out yet."""
        self._redis, self._gateway = redis, gateway
        self._desk, self._inbox, self._clock = desk, inbox, clock
        self._unsent, self._stale_after = unsent, stale_after
        self._wanted = asyncio.Event()

    def request(self) -> None:
        """Compare all requests in flight with the streams soon."""
        self._wanted.set()

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(STALE_CHECK_SECONDS):
                    await self._wanted.wait()
            except TimeoutError:
                if not self._desk.stale(self._clock() - self._stale_after):
                    continue
            everything = self._wanted.is_set()
            self._wanted.clear()
            try:
                await self._reconcile(everything)
                backoff.reset()
            except TRANSIENT as e:
                log.debug("reconciling waits for Redis: %s", e)
                self._wanted.set()
                await backoff.wait()

    async def _reconcile(self, everything: bool) -> None:
        """Two looks, because a request may move, or be answered, while one looks."""
        suspects = await self._missing(self._suspects(everything))
        if suspects:
            suspects = await self._missing(suspects)
        for choice, attempt, arrived in suspects:
            if choice.finish is None and (choice.attempt, len(choice.tokens)) == (attempt, arrived):
                log.warning("request %s lies in no stream; it is sent again", choice.id)
                self._desk.resubmit(choice)

    def _suspects(self, everything: bool) -> list[tuple[Choice, int, int]]:
        moment = float("inf") if everything else self._clock() - self._stale_after
        return [(c, c.attempt, len(c.tokens)) for c in self._desk.stale(moment)]

    async def _missing(
        self, suspects: list[tuple[Choice, int, int]]
    ) -> list[tuple[Choice, int, int]]:
        if not suspects:
            return []
        held: set[Attempt] = set(self._unsent())
        for model in sorted({c.request.model for c, _, _ in suspects}):
            held |= await self._queued(model)
        for raw in sorted(await self._redis.smembers(names.REPLICAS)):
            held |= await self._released(raw.decode())
        await self._catch_up()
        missing = [s for s in suspects if (s[0].id, s[1]) not in held]
        for choice, _, _ in suspects:  # those that are held are asked after again later
            if (choice.id, choice.attempt) in held:
                choice.progress_at = self._clock()
        return missing

    async def _queued(self, model: str) -> set[Attempt]:
        found: set[Attempt] = set()
        async for fields in self._entries(names.requests(model)):
            if fields.get(b"gateway", b"").decode() == self._gateway:
                found.add((fields[b"id"].decode(), int(fields[b"attempt"])))
        return found

    async def _released(self, replica: str) -> set[Attempt]:
        found: set[Attempt] = set()
        async for fields in self._entries(names.batches(replica)):
            try:
                batch = decode(fields.get(BODY, b""), Batch)
                for body in batch.requests:
                    request = decode(body, Generate)
                    found.add((request.id, request.attempt))
            except DecodeError as e:  # its reader puts it into dead-letters
                log.warning("a batch of %s does not decode: %s", replica, e.reason)
        return found

    async def _entries(self, stream: str) -> AsyncIterator[dict[bytes, bytes]]:
        start = "-"
        while True:
            page = await self._redis.xrange(stream, min=start, count=PAGE)
            for _, fields in page:
                yield fields
            if len(page) < PAGE:
                return
            start = f"({page[-1][0].decode()}"

    async def _catch_up(self) -> None:
        """Until the inbox has read what was in the reply stream just now (or some seconds)."""
        try:
            info = await self._redis.xinfo_stream(names.replies(self._gateway))
        except ResponseError:
            return  # no such stream: nothing was answered
        end = stream_id(info["last-generated-id"])
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                await self._inbox.reached(end)
        except TimeoutError:
            log.warning("the reply stream is not read up to its end; looking anyway")
