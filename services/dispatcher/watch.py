"""The registry of replicas, read from their records and heartbeats.

A heartbeat that is missing twice in a row means death, unless Redis itself was away just now:
then every heartbeat is missing, and replicas get a TTL's time to renew theirs.
"""

from __future__ import annotations

import logging
import time

import msgspec
import orjson
from redis.asyncio import Redis

from services.dispatcher.policies.base import ReplicaView
from shared import names
from shared.records import SILENCE, ReplicaRecord
from shared.replica_state import ANSWERING, DISPATCHABLE, State

log = logging.getLogger(__name__)

SLOW_SECONDS = 0.5  # a round trip that takes longer counts as an outage of Redis
MISSES = 2  # missing heartbeats in consecutive rounds that mean death
_ALIVE_STATES = ANSWERING | {State.STARTING, State.DRAINING}


class Death(msgspec.Struct, frozen=True):
    """A replica whose heartbeat is lost, with the incarnation that is meant."""

    replica: str
    incarnation: str


class Round(msgspec.Struct, frozen=True):
    """What one look at all replicas brought."""

    models: tuple[str, ...]
    seen: tuple[ReplicaRecord, ...]  # alive ones whose view changed
    gone: tuple[tuple[str, str], ...]  # (model, replica): not to be released to any more
    dead: tuple[Death, ...]  # heartbeat lost: to be declared dead
    stale: tuple[tuple[str, str], ...]  # (replica, incarnation): look for work left over


class Trust:
    """Whether a missing heartbeat may be believed: not just after Redis was away."""

    def __init__(self) -> None:
        self._until = time.monotonic() + SILENCE

    def doubt(self) -> None:
        """Redis did not answer, or late."""
        self._until = time.monotonic() + SILENCE

    def __bool__(self) -> bool:
        return time.monotonic() >= self._until


class ReplicaWatch:
    """Keeps what the last round saw, so that a round reports changes only."""

    def __init__(self, redis: Redis, trust: Trust) -> None:
        self._redis, self._trust = redis, trust
        self.records: dict[str, ReplicaRecord] = {}
        self._views: dict[str, ReplicaView] = {}
        self._misses: dict[str, int] = {}
        self._damaged: set[str] = set()

    async def look(self) -> Round:
        """One round over all replicas (two round trips)."""
        started = time.monotonic()
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.smembers(names.MODELS)
            pipe.smembers(names.REPLICAS)
            models, replicas = await pipe.execute()
        ids = sorted(raw.decode() for raw in replicas)
        async with self._redis.pipeline(transaction=False) as pipe:
            for replica in ids:
                pipe.hgetall(names.replica(replica))
                pipe.get(names.replica_alive(replica))
            answers = await pipe.execute()
        if time.monotonic() - started > SLOW_SECONDS:
            self._trust.doubt()
        result = _Result()
        for i, replica in enumerate(ids):
            self._one(replica, answers[2 * i], answers[2 * i + 1], result)
        for replica in set(self.records) - set(ids):  # forgotten by an operator
            self._leave(replica, result)
            del self.records[replica]
        return result.freeze(tuple(sorted(raw.decode() for raw in models)))

    def _one(self, replica: str, raw: dict[bytes, bytes], alive: bytes | None, r: _Result) -> None:
        record = self._parse(replica, raw)
        if record is None:
            return
        before = self.records.get(replica)
        self.records[replica] = record
        if before is not None and before.incarnation != record.incarnation:
            self._leave(replica, r, before.model)
            r.stale.append((replica, record.incarnation))
        living = alive is not None and alive.decode() == record.incarnation
        if living:
            self._misses.pop(replica, None)
        state = record.state
        if living and state in _ALIVE_STATES:
            view = view_of(record)
            if self._views.get(replica) != view:
                self._views[replica] = view
                r.seen.append(record)
            return
        if state not in _ALIVE_STATES:
            if replica in self._views or before is None or before.state != state:
                self._leave(replica, r)
                r.stale.append((replica, ""))
        elif alive is None:
            self._missed(record, r)

    def _missed(self, record: ReplicaRecord, r: _Result) -> None:
        if not self._trust:
            return
        misses = self._misses.get(record.id, 0) + 1
        self._misses[record.id] = misses
        if misses >= MISSES:
            self._leave(record.id, r)
            r.dead.append(Death(record.id, record.incarnation))

    def _leave(self, replica: str, r: _Result, model: str | None = None) -> None:
        if self._views.pop(replica, None) is not None:
            r.gone.append((model or self.records[replica].model, replica))

    def _parse(self, replica: str, raw: dict[bytes, bytes]) -> ReplicaRecord | None:
        if not raw:
            return None
        try:
            record = ReplicaRecord.from_hash(raw)
        except (msgspec.ValidationError, orjson.JSONDecodeError, UnicodeDecodeError) as e:
            if replica not in self._damaged:
                log.error("record %s cannot be read: %s", names.replica(replica), e)
                self._damaged.add(replica)
            return None
        self._damaged.discard(replica)
        if not record.id or not record.model:
            return None  # its replica has not written it yet
        return record


class _Result:
    """A Round while it is being filled."""

    def __init__(self) -> None:
        self.seen: list[ReplicaRecord] = []
        self.gone: list[tuple[str, str]] = []
        self.dead: list[Death] = []
        self.stale: list[tuple[str, str]] = []

    def freeze(self, models: tuple[str, ...]) -> Round:
        return Round(
            models, tuple(self.seen), tuple(self.gone), tuple(self.dead), tuple(self.stale)
        )


def view_of(record: ReplicaRecord) -> ReplicaView:
    """The record as a policy sees it."""
    return ReplicaView(
        id=record.id,
        dispatchable=record.state in DISPATCHABLE,
        idle=record.state == State.IDLE,
        training=record.state == State.COMBINED,
        b_limit=max(1, min(record.b or record.b_max, record.b_max)),
        b_max=max(1, record.b_max),
        B=record.B,
        B_wanted=record.B_star,
        kv_total=record.kv_total,
        context=record.context,
        adapters=record.adapters,
        quality=record.q,
        latency=record.latency(),
    )
