"""Reads the request and control streams of all models as one consumer of the group.

What cannot be understood goes to dead-letters, and its gateway is told if it can be made out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from services.dispatcher.entries import BadEntry, Entry, parse
from services.dispatcher.scripts import FORGET_CONSUMER, Call, run
from shared import names
from shared.clock import Now
from shared.dead_letters import bury
from shared.lease import Lease
from shared.messages import BODY, Cancel, DecodeError, Failed, decode, encode
from shared.redis_client import BLOCK_MS, ensure_group

log = logging.getLogger(__name__)

Fields = Mapping[bytes, bytes]

FORGET_CONSUMER_MS = 60_000  # idle time after which a consumer without pending work is deleted


class Intake:
    """``on_request(model, entry)`` and ``on_cancel(model, request id)`` are called for each.

    A request that lay in its stream when this run began, or with another consumer, is not fresh.
    """

    def __init__(
        self,
        redis: Redis,
        lease: Lease,
        clock: Now,
        count: int,
        on_request: Callable[[str, Entry], None],
        on_cancel: Callable[[str, str], None],
    ) -> None:
        self._redis, self._lease, self._clock = redis, lease, clock
        self._consumer, self._count = lease.holder, count
        self._on_request, self._on_cancel = on_request, on_cancel
        self._streams: dict[bytes, tuple[str, bool]] = {}  # name -> (model, is control)
        self._began = 0  # milliseconds of Redis time

    async def add(self, model: str) -> None:
        """Serve a model from now on."""
        for stream, is_control in (
            (names.requests(model), False),
            (names.dispatcher_control(model), True),
        ):
            await ensure_group(self._redis, stream, names.GROUP_DISPATCHER)
            self._streams[stream.encode()] = (model, is_control)

    @property
    def models(self) -> set[str]:
        return {model for model, _ in self._streams.values()}

    async def read(self) -> None:
        """Wait for new entries and take them."""
        streams = dict.fromkeys(self._streams, ">")
        reply = await self._redis.xreadgroup(
            names.GROUP_DISPATCHER, self._consumer, streams, count=self._count, block=BLOCK_MS
        )
        for stream, entries in reply or ():
            model, is_control = self._streams[stream]
            now = self._clock()
            if is_control:
                await self._commands(stream, model, entries)
            else:
                for entry_id, fields in entries:
                    fresh = _order(entry_id)[0] >= self._began
                    await self._request(stream, model, entry_id, fields, now, fresh=fresh)

    async def recover(self) -> int:
        """Take what this consumer had pending when its last run ended, then what others have."""
        taken, self._began = 0, int(self._clock() * 1e3)
        for stream in list(self._streams):
            taken += await self._history(stream, "0", None)
        return taken + await self.claim()

    async def claim(self) -> int:
        """Take over what other (former) consumers have pending; returns how many."""
        taken = 0
        for stream in list(self._streams):
            consumers = await self._redis.xinfo_consumers(stream, names.GROUP_DISPATCHER)
            for consumer in consumers:
                name = consumer["name"].decode()
                if name == self._consumer:
                    continue
                taken += await self._claim_from(stream, name)
                if consumer["pending"] == 0 and consumer["idle"] > FORGET_CONSUMER_MS:
                    await self._forget(stream.decode(), name)
        return taken

    async def _forget(self, stream: str, consumer: str) -> None:
        keys = (self._lease.fence_key, stream)
        args = (self._lease.token, names.GROUP_DISPATCHER, consumer)
        (result,) = await run(self._redis, [Call(FORGET_CONSUMER, keys, args)])
        if isinstance(result, Exception):
            raise result

    async def _claim_from(self, stream: bytes, consumer: str) -> int:
        taken = 0
        while True:
            pending = await self._redis.xpending_range(
                stream, names.GROUP_DISPATCHER, "-", "+", self._count, consumername=consumer
            )
            if not pending:
                return taken
            ids = [entry["message_id"] for entry in pending]
            await self._redis.xclaim(
                stream, names.GROUP_DISPATCHER, self._consumer, 0, ids, justid=True
            )
            time, number = _order(ids[0])
            before = f"{time}-{number - 1}" if number else f"{time - 1}"
            taken += await self._history(stream, before, ids)

    async def _history(self, stream: bytes, after: str, ids: Sequence[bytes] | None) -> int:
        """Entries that are pending with this consumer, after one id: these, in order, or all.

        What it had before lies between those that it claimed, and is on its desk already.
        """
        wanted, taken = None if ids is None else frozenset(ids), 0
        last = None if ids is None else _order(ids[-1])
        while True:
            reply = await self._redis.xreadgroup(
                names.GROUP_DISPATCHER, self._consumer, {stream: after}, count=self._count
            )
            entries = reply[0][1] if reply else []
            if not entries:
                return taken
            for entry_id, fields in entries:
                if last is not None and _order(entry_id) > last:
                    return taken
                if wanted is None or entry_id in wanted:
                    await self._one(stream, entry_id, fields)
                    taken += 1
            after = entries[-1][0].decode()

    async def _one(self, stream: bytes, entry_id: bytes, fields: Any) -> None:
        model, is_control = self._streams[stream]
        if not fields:  # deleted while it was pending
            await self._redis.xack(stream, names.GROUP_DISPATCHER, entry_id)
        elif is_control:
            await self._commands(stream, model, [(entry_id, fields)])
        else:
            await self._request(stream, model, entry_id, fields, self._clock(), fresh=False)

    async def _request(
        self,
        stream: bytes,
        model: str,
        entry_id: bytes,
        fields: Fields,
        now: float,
        *,
        fresh: bool,
    ) -> None:
        try:
            entry = parse(entry_id, fields, now, fresh=fresh)
        except BadEntry as e:
            await self._bury(stream, entry_id, fields, str(e))
            return
        self._on_request(model, entry)

    async def _commands(
        self, stream: bytes, model: str, entries: list[tuple[bytes, Fields]]
    ) -> None:
        done = []
        for entry_id, fields in entries:
            try:
                self._on_cancel(model, decode(fields.get(BODY, b""), Cancel).id)
            except DecodeError as e:
                await self._bury(stream, entry_id, fields, str(e))
            else:
                done.append(entry_id)
        if done:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xack(stream, names.GROUP_DISPATCHER, *done)
                pipe.xdel(stream, *done)
                await pipe.execute()

    async def _bury(self, stream: bytes, entry_id: bytes, fields: Fields, reason: str) -> None:
        name = stream.decode()
        log.error("%s: entry %s goes to dead-letters: %s", name, entry_id.decode(), reason)
        await bury(
            self._redis, name, names.GROUP_DISPATCHER, entry_id, fields, reason, by="dispatcher"
        )
        try:
            gateway, request_id = fields[b"gateway"].decode(), fields[b"id"].decode()
        except (KeyError, UnicodeDecodeError):
            return  # nobody can be told
        if await self._redis.exists(names.gateway_alive(gateway)):
            failed = Failed(
                id=request_id,
                attempt=int(fields.get(b"attempt", b"1")) if _digits(fields) else 1,
                status=500,
                code="bad_request_entry",
                message=f"the request could not be queued: {reason}",
            )
            await self._redis.xadd(names.replies(gateway), {BODY: encode(failed)})


def _digits(fields: Fields) -> bool:
    return fields.get(b"attempt", b"1").isdigit()


def _order(stream_id: bytes) -> tuple[int, int]:
    time, _, number = stream_id.partition(b"-")
    return int(time), int(number)
