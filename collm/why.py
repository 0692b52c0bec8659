"""Explanations from the audit log: why is this replica in this state, why did this request wait."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from redis.asyncio import Redis

from shared import names
from shared.messages import BODY, DecodeError, Finished, StepSample, decode
from shared.records import ReplicaRecord

PAGE = 500  # entries a read, newest first
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # of an answer's id
_MARK = re.compile(r"-[0-9a-f]{8}(?:[./]|$)")


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


async def request(redis: Redis, name: str) -> list[dict[str, str]]:
    """The releases of a request (each attempt one), oldest first, with their numbers.

    ``name``: its id, an answer's ``id``, or the x-request-id that its client gave.
    """
    request_id, found = plain_id(name), []
    upper = "+"
    while page := await redis.xrevrange(names.DECISIONS, max=upper, count=PAGE):
        for entry, fields in page:
            plain = {k.decode(): v.decode(errors="replace") for k, v in fields.items()}
            if any(_is(key, request_id) for key in plain.get("requests", "").split()):
                found.append({"id": entry.decode(), **plain})
        upper = "(" + page[-1][0].decode()
    if found:
        await _add_ends(redis, found, request_id)
    return found[::-1]


async def _add_ends(redis: Redis, releases: list[dict[str, str]], request_id: str) -> None:
    """Note at each release which of its members ended when, from the replicas' samples."""
    earliest = releases[-1]["id"]
    lower, ends = earliest.split("-")[0], {}
    while page := await redis.xrange(names.METRICS, min=lower, count=PAGE):
        for _, fields in page:
            if fields.get(b"kind", b"").startswith(b"step"):
                ends.update(_ends(fields.get(BODY, b""), request_id))
        lower = "(" + page[-1][0].decode()
    for release in releases:
        for key in release.get("requests", "").split():
            if key in ends:
                at, end = ends[key]
                released = float(release["released"])
                for name, moment in (("started", end.started), ("first_token", end.first_token)):
                    if moment:
                        release[f"{name}:{key}"] = f"{moment - released:.4f} s after its release"
                what = f"{end.output_tokens} tokens, {end.reason}"
                release[f"ended:{key}"] = f"{at - released:.4f} s after its release: {what}"


def _ends(body: bytes, request_id: str) -> dict[str, tuple[float, Finished]]:
    """Key -> (Redis seconds, its end) of the request's choices that ended in a step."""
    try:
        sample = decode(body, StepSample)
    except DecodeError:
        return {}  # the dispatcher reports it
    return {
        f"{f.id}/{f.attempt}": (sample.time, f) for f in sample.finished if _is(f.id, request_id)
    }


def _is(key: str, request_id: str) -> bool:
    """``key`` is <request id>.<choice>/<attempt>; a shorter id means all below it.

    The gateway adds a mark to an x-request-id that a client gives: those of all such requests.
    """
    if key == request_id or key.startswith((request_id + ".", request_id + "/")):
        return True
    rest = key.removeprefix(request_id) if key.startswith(request_id) else ""
    return _MARK.match(rest) is not None


def plain_id(name: str) -> str:
    """The request id in what a client sees: an answer's ``id`` is that with a prefix."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
