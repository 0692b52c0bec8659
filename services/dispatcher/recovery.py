"""Work found in the replicas' streams: after a restart of the dispatcher, after a death."""

from __future__ import annotations

import logging

import msgspec
from redis.asyncio import Redis

from services.dispatcher.entries import Entry, of_generate
from services.dispatcher.scripts import REAP, Call, run
from shared import names
from shared.dead_letters import bury
from shared.lease import Lease
from shared.messages import BODY, Batch, DecodeError, Generate, Lost, decode, encode
from shared.replica_state import Refused, State, move

log = logging.getLogger(__name__)

PAGE = 100  # batches read at once


class Released(msgspec.Struct, frozen=True):
    """A batch that lies in a replica's stream."""

    replica: str
    stream_id: bytes
    incarnation: str
    released: float
    entries: tuple[Entry, ...]


async def batches_of(redis: Redis, replica: str) -> list[Released]:
    """All unfinished batches of a replica; what cannot be decoded goes to dead-letters."""
    found: list[Released] = []
    stream, start = names.batches(replica), "-"
    while True:
        page = await redis.xrange(stream, min=start, count=PAGE)
        for stream_id, fields in page:
            try:
                found.append(_released(replica, stream_id, fields))
            except DecodeError as e:
                log.error("%s: batch %s goes to dead-letters: %s", stream, stream_id.decode(), e)
                await bury(
                    redis, stream, names.GROUP_REPLICA, stream_id, fields, str(e), by="dispatcher"
                )
        if len(page) < PAGE:
            return found
        start = "(" + page[-1][0].decode()


def _released(replica: str, stream_id: bytes, fields: dict[bytes, bytes]) -> Released:
    batch = decode(fields.get(BODY, b""), Batch)
    entries = []
    for raw, queued in zip(batch.requests, batch.queued, strict=False):
        entries.append(of_generate(decode(raw, Generate), b"", raw, queued))
    incarnation = fields.get(b"incarnation", b"").decode()
    return Released(replica, stream_id, incarnation, batch.released, tuple(entries))


async def declare_dead(redis: Redis, replica: str, incarnation: str) -> bool:
    """Whether it could be: another incarnation may live by now."""
    why = "heartbeat lost"
    try:
        await move(redis, replica, State.DEAD, by="dispatcher", why=why, incarnation=incarnation)
    except Refused as e:
        log.info("not declared dead: %s", e)
        return False
    log.warning("%s is dead: its heartbeat is lost", replica)
    return True


async def keys_in(redis: Redis, replica: str) -> set[str]:
    """Keys of the requests in a replica's stream (plain field, bodies are not decoded)."""
    present: set[str] = set()
    start = "-"
    while True:
        page = await redis.xrange(names.batches(replica), min=start, count=PAGE)
        for _, fields in page:
            present.update(fields.get(b"requests", b"").decode().split(" "))
        if len(page) < PAGE:
            return present
        start = "(" + page[-1][0].decode()


async def reap(redis: Redis, lease: Lease, replica: str, incarnation: str = "") -> int:
    """Tell the gateways of a dead replica's unfinished requests; returns how many requests.

    Batches of the living ``incarnation`` stay ("": none lives). Deletion of a batch and the
    ``Lost`` of its members are one transaction, so that each is told exactly once.
    """
    calls, sizes = [], []
    stream = names.batches(replica)
    for batch in await batches_of(redis, replica):
        if incarnation and batch.incarnation == incarnation:
            continue
        replies = [
            key
            for e in batch.entries
            for key in (names.replies(e.gateway), names.gateway_alive(e.gateway))
        ]
        lost = [encode(Lost(id=e.id, attempt=e.attempt, replica=replica)) for e in batch.entries]
        calls.append(
            Call(
                REAP,
                (lease.fence_key, stream, *replies),
                (lease.token, names.GROUP_REPLICA, batch.stream_id, *lost),
            )
        )
        sizes.append(len(lost))
    members = 0
    for result, size in zip(await run(redis, calls) if calls else (), sizes, strict=True):
        if isinstance(result, Exception):
            raise result
        members += size if result else 0  # 0: the replica itself was faster
    if members:
        log.warning("%s is gone: told the gateways of %d requests", replica, members)
    return members
