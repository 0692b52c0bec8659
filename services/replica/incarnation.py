"""A replica's life in Redis: taking its id, heartbeats, giving back what a dead life left.

An incarnation is one life of a replica. What a life leaves unfinished in its batch stream is
given back to the gateways as ``Lost`` by whoever notices first, the dispatcher or the next life;
each entry once, because giving back and deleting is one step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time

import msgspec
from redis.asyncio import Redis

from services.replica.intake import poisoned
from shared import names
from shared.messages import BODY, Batch, DecodeError, Generate, Lost, Message, decode, encode
from shared.records import HEARTBEAT_TTL_MS, SILENCE, ReplicaRecord
from shared.replica_state import Refused, State, event, move

log = logging.getLogger(__name__)

# One entry: only if it is still there, tell the gateways and delete it.
_GIVE_BACK = """
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then return 0 end
for i = 3, #ARGV do
  local replies, alive = KEYS[2 * i - 4], KEYS[2 * i - 3]
  if redis.call('EXISTS', replies, alive) > 0 then
    redis.call('XADD', replies, '*', 'body', ARGV[i])
  end
end
redis.call('XACK', KEYS[1], ARGV[2], ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
"""


class IdInUse(RuntimeError):
    """Another live process has this replica id; names its host and process."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat found in the record."""

    state: State | None  # None: Redis has lost the record
    ours: bool  # whether the record names our incarnation


class Incarnation:
    """One replica's record and heartbeat. ``begin`` makes a new life."""

    def __init__(
        self, redis: Redis, replica: str, model: str, engine: str, threads: int, *, trains: bool
    ) -> None:
        self._redis, self.replica, self._model = redis, replica, model
        self._engine, self._threads, self._trains = engine, threads, trains
        self.id = ""

    async def take_id(self) -> None:
        """Wait until no other process beats for this id. Raises IdInUse if one goes on."""
        end = time.monotonic() + SILENCE
        while time.monotonic() < end:
            if await self._redis.get(names.replica_alive(self.replica)) is None:
                return
            record = await self.record()
            if record.host == socket.gethostname() and not _runs(record.pid):
                return
            await asyncio.sleep(0.1)
        record = await self.record()
        raise IdInUse(
            f"replica id {self.replica!r} is in use by process {record.pid} on {record.host}; "
            "stop it, or set another id"
        )

    async def record(self) -> ReplicaRecord:
        """The record as it is; a damaged one counts as empty."""
        raw = await self._redis.hgetall(names.replica(self.replica))
        try:
            return ReplicaRecord.from_hash(raw)
        except (msgspec.ValidationError, ValueError) as e:
            log.warning("record of %s is damaged and is written anew: %s", self.replica, e)
            return ReplicaRecord()

    async def begin(self, why: str) -> None:
        """Start a new life: state ``starting``, record, nothing left over from the last one."""
        self.id = secrets.token_hex(6)
        await self.bury(why)
        seconds, _ = await self._redis.time()
        fresh = ReplicaRecord(
            id=self.replica,
            model=self._model,
            engine=self._engine,
            incarnation=self.id,
            trains=self._trains,
            thread_slots=self._threads,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=float(seconds),
        )
        fields = ("id", "model", "engine", "incarnation", "thread_slots", "host", "pid", "started",
                  "in_flight", "waiting", "trains")  # fmt: skip
        await self._redis.sadd(names.REPLICAS, self.replica)
        await self._redis.hset(names.replica(self.replica), mapping=fresh.to_hash(*fields))
        await move(self._redis, self.replica, State.STARTING, by=self.replica, why=why)
        await self._redis.set(names.replica_alive(self.replica), self.id, px=HEARTBEAT_TTL_MS)
        given = await self.give_back(why)
        log.info(
            "%s: incarnation %s (%s)%s",
            self.replica,
            self.id,
            why,
            f"; {given} requests given back" if given else "",
        )

    async def bury(self, why: str) -> None:
        """Move the last life to ``dead`` if its record still says that it lives."""
        found = await self._redis.hget(names.replica(self.replica), "state")
        if found is None or found.decode() in (State.STOPPED, State.DEAD, ""):
            return
        try:
            await move(self._redis, self.replica, State.DEAD, by=self.replica, why=why)
        except Refused as e:
            log.debug("%s", e)  # somebody else was faster

    async def serve(self, why: str) -> None:
        """starting -> serving. Raises Refused."""
        await move(
            self._redis, self.replica, State.SERVING,
            by=self.replica, why=why, expected=frozenset({State.STARTING}), incarnation=self.id,
        )  # fmt: skip

    async def move(self, to: State, why: str) -> None:
        """Any other move of our own; a refusal is logged, not raised."""
        try:
            await move(self._redis, self.replica, to, by=self.replica, why=why, incarnation=self.id)
        except Refused as e:
            log.warning("%s", e)

    async def beat(self, alive: bool) -> Beat:
        """One heartbeat (withheld when the loop is stuck) and a look at the record."""
        async with self._redis.pipeline(transaction=False) as pipe:
            if alive:
                pipe.set(names.replica_alive(self.replica), self.id, px=HEARTBEAT_TTL_MS)
            pipe.hmget(names.replica(self.replica), "state", "incarnation")
            state, incarnation = (await pipe.execute())[-1]
        known = State(state.decode()) if state and state.decode() in set(State) else None
        return Beat(state=known, ours=incarnation == self.id.encode())

    async def restore(self) -> None:
        """Redis came back without our record: write it again; our requests are still served."""
        await self._redis.sadd(names.REPLICAS, self.replica)
        record = ReplicaRecord(
            id=self.replica, model=self._model, engine=self._engine, incarnation=self.id,
            thread_slots=self._threads, host=socket.gethostname(), pid=os.getpid(),
            trains=self._trains,
        )  # fmt: skip
        fields = ("id", "model", "engine", "incarnation", "thread_slots", "host", "pid", "trains")
        await self._redis.hset(names.replica(self.replica), mapping=record.to_hash(*fields))
        why = "record was lost with Redis's data"
        await move(self._redis, self.replica, State.STARTING, by=self.replica, why=why)
        await self.serve(why)

    async def end(self) -> None:
        """Stop beating for good."""
        await self._redis.delete(names.replica_alive(self.replica))

    async def give_back(self, why: str) -> int:
        """Send ``Lost`` for everything in the batch stream and empty it; returns the requests.

        The audit log gets their number, as from a dispatcher that finds a replica dead.
        """
        stream, given = names.batches(self.replica), 0
        while entries := await self._redis.xrange(stream, count=100):
            for entry_id, fields in entries:
                lost = _members(fields.get(BODY, b""), self.replica)
                keys = [stream]
                for gateway, _ in lost:
                    keys += [names.replies(gateway), names.gateway_alive(gateway)]
                given += len(lost) * await self._redis.eval(
                    _GIVE_BACK, len(keys), *keys, entry_id, names.GROUP_REPLICA,
                    *(encode(message) for _, message in lost),
                )  # fmt: skip
        if given:
            own = self.replica
            await event(self._redis, "lost", replica=own, requests=given, by=own, why=why)
        return given


def _members(body: bytes, replica: str) -> list[tuple[str, Message]]:
    """Gateway and message for each request of a batch; what names no gateway is left out."""
    try:
        batch = decode(body, Batch)
    except DecodeError as e:
        log.error("a batch of %s cannot be given back: %s", replica, e.reason)
        return []
    told: list[tuple[str, Message]] = []
    for raw in batch.requests:
        try:
            request = decode(raw, Generate)
        except DecodeError as e:
            if (damaged := poisoned(raw, e.reason)) is not None:
                told.append(damaged)
            continue
        lost = Lost(id=request.id, attempt=request.attempt, replica=replica)
        told.append((request.gateway, lost))
    return told


def _runs(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
