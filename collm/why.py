"""Explanations from the audit log: why is this replica in this state."""

from __future__ import annotations

from typing import Any

import msgspec
from redis.asyncio import Redis

from shared import names
from shared.records import ReplicaRecord

PAGE = 500  # entries a read, newest first


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one replica: its record, and the events that name it."""

    replica: str
    record: dict[str, Any]
    events: list[dict[str, str]]  # oldest first; "id" is the entry's


async def replica(redis: Redis, name: str, count: int) -> Explanation | None:
    """The last ``count`` events about a replica; None when no replica of that name is known."""
    raw = await redis.hgetall(names.replica(name))
    if not raw:
        return None
    record = ReplicaRecord.from_hash(raw)
    plain = {
        "state": record.state,
        "since": record.since,
        "by": record.by,
        "why": record.why,
        "b": record.b,
        "B": record.B,
        "b_star": record.b_star,
        "B_star": record.B_star,
        "q": record.q,
        "data": record.data,
        "adapters": record.adapters,
        "coefficients": record.coefficients,
    }
    return Explanation(replica=name, record=plain, events=await _about(redis, name, count))


async def _about(redis: Redis, name: str, count: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    upper = "+"
    while len(found) < count:
        page = await redis.xrevrange(names.EVENTS, max=upper, count=PAGE)
        if not page:
            break
        for entry, fields in page:
            event = {k.decode(): v.decode(errors="replace") for k, v in fields.items()}
            if _names(event, name):
                found.append({"id": entry.decode(), **event})
        upper = "(" + page[-1][0].decode()
    return found[:count][::-1]


def _names(event: dict[str, str], name: str) -> bool:
    """Whether the event is about the replica: named alone, as client, server or used one."""
    if name in (event.get("replica"), event.get("server")):
        return True
    return any(name in event.get(field, "").split(",") for field in ("clients", "used"))
