"""A look at the cluster through Redis: streams, replicas, models, adapters."""

from __future__ import annotations

import msgspec
import orjson
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared import names
from shared.records import ReplicaRecord

# Logs with a bounded length: read by cursor, never drained.
LOGS = frozenset({names.METRICS, names.EVENTS, names.DECISIONS, names.DEAD_LETTERS})


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream's entries, and how many of them a group has read and not acknowledged."""

    length: int
    pending: int


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What `collm queues` shows of a replica."""

    id: str
    state: str
    model: str
    b: int
    in_flight: int
    adapters: dict[str, str]


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """Every work stream by its Redis name, and the replicas by id."""

    streams: dict[str, Stream]
    replicas: list[Replica]


async def queues(redis: Redis) -> Queues:
    """Work streams (length and pending are 0 when drained) and replicas. Logs are not in it."""
    streams = {}
    async for key in redis.scan_iter(match=f"{names.PREFIX}*", count=1000, _type="STREAM"):
        if key.decode() not in LOGS:
            streams[key.decode()] = await stream(redis, key.decode())
    found = [_brief(record) for record in await replicas(redis)]
    return Queues(streams=dict(sorted(streams.items())), replicas=found)


async def stream(redis: Redis, name: str) -> Stream:
    """Length of a stream, pending over all its groups; zeros when it is gone."""
    try:
        groups = await redis.xinfo_groups(name)
    except ResponseError:  # the key was deleted since we saw it
        return Stream(length=0, pending=0)
    return Stream(length=await redis.xlen(name), pending=sum(g["pending"] for g in groups))


async def replicas(redis: Redis) -> list[ReplicaRecord]:
    """The records of all replicas not forgotten, by id; damaged ones show state ``damaged``."""
    ids = sorted((i.decode() for i in await redis.smembers(names.REPLICAS)), key=_natural)
    records = []
    for replica in ids:
        raw = await redis.hgetall(names.replica(replica))
        try:
            records.append(ReplicaRecord.from_hash({b"id": replica.encode(), **raw}))
        except (msgspec.ValidationError, orjson.JSONDecodeError):
            records.append(ReplicaRecord(id=replica, state="damaged"))
    return records


async def forget(redis: Redis, replica: str) -> str | None:
    """Remove the record and the empty streams of a replica; returns why not, if refused."""
    state = await redis.hget(names.replica(replica), "state")
    if await redis.exists(names.replica_alive(replica)):
        return f"{replica} is alive ({(state or b'').decode()}); stop it first"
    left = (await stream(redis, names.batches(replica))).length
    if left:
        return f"{replica} still holds {left} batches; the dispatcher must take them back first"
    await redis.srem(names.REPLICAS, replica)
    keys = (names.replica, names.batches, names.control, names.replica_wanted)
    await redis.delete(*(key(replica) for key in keys))
    return None


def _brief(record: ReplicaRecord) -> Replica:
    return Replica(
        id=record.id,
        state=record.state,
        model=record.model,
        b=record.b,
        in_flight=record.in_flight,
        adapters=record.adapters,
    )


def _natural(name: str) -> tuple[str, int]:
    """replica-2 before replica-10."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)
