"""Carries out what the desks and policies decided: everything of one turn in one round trip."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from redis.asyncio import Redis

from services.dispatcher.counters import Counters
from services.dispatcher.desk import Desk
from services.dispatcher.entries import Entry, Refusal
from services.dispatcher.policies.base import Preempt, Promote, Release, Suspend
from services.dispatcher.scripts import ANSWER, RELEASE, TAKE_BACK, Call, run
from shared import names
from shared.clock import Now
from shared.control import send_command
from shared.entries import request_values
from shared.lease import Lease
from shared.messages import (
    Batch,
    Cancel,
    Failed,
    Generate,
    SuspendTraining,
    decode,
    encode,
)
from shared.replica_state import Refused, State, move

log = logging.getLogger(__name__)


class Sending(msgspec.Struct, frozen=True):
    """A release on its way."""

    desk: Desk
    replica: str
    incarnation: str
    entries: list[Entry]
    batch: bytes
    batch_id: str
    numbers: bytes
    released: float
    waits: list[tuple[float, float]]  # seconds each waited for the policy, and of those on purpose


class Outbox:
    """Filled during a turn, flushed at its end."""

    def __init__(
        self, redis: Redis, lease: Lease, clock: Now, counters: Counters, decisions_kept: int
    ) -> None:
        self._redis, self._lease, self._clock = redis, lease, clock
        self._counters, self._kept = counters, decisions_kept
        self._sendings: list[Sending] = []
        self._recalls: list[Call] = []
        self._promotions: list[Promote] = []
        self._suspensions: list[Suspend] = []
        self._count = 0

    def release(self, desk: Desk, action: Release, incarnation: str, now: float) -> None:
        """Take the requests from the desk and pack them."""
        waits = [desk.waits(key, now) for key in action.requests if key in desk.waiting]
        entries = desk.take(action.requests, action.replica, now)
        if not entries:
            return
        self._count += 1
        batch_id = f"{self._lease.token}-{self._count}"
        batch = Batch(
            id=batch_id,
            released=now,
            queued=tuple(e.queued for e in entries),
            requests=tuple(e.body for e in entries),
        )
        self._sendings.append(
            Sending(
                desk,
                action.replica,
                incarnation,
                entries,
                encode(batch),
                batch_id,
                self._numbers(action, entries, now),
                now,
                waits,
            )
        )

    def _numbers(self, action: Release, entries: list[Entry], now: float) -> bytes:
        """JSON of the decision's numbers, and of what was promised to each request."""
        if not self._kept:
            return b"{}"
        promised = {f"limits:{e.key}": _limits(e, now) for e in entries}
        return orjson.dumps({**action.why, **promised}, option=orjson.OPT_SERIALIZE_NUMPY)

    def preempt(self, desk: Desk, action: Preempt) -> None:
        """Queue copies of the requests again and tell the replica to cancel them."""
        for entry in desk.recall(action.requests, action.replica):
            values = request_values(decode(entry.body, Generate))
            self._recalls.append(
                Call(
                    TAKE_BACK,
                    (
                        self._lease.fence_key,
                        names.requests(desk.model),
                        names.control(action.replica),
                    ),
                    (
                        *(self._lease.token, entry.id, encode(Cancel(id=entry.id))),
                        *("taken_from", action.replica, *values),
                    ),
                )
            )

    def promote(self, action: Promote) -> None:
        self._promotions.append(action)

    def suspend(self, action: Suspend) -> None:
        self._suspensions.append(action)

    async def flush(self, desks: list[Desk]) -> None:
        """Carry out everything; a refused release is put back on its desk."""
        sendings, self._sendings = self._sendings, []
        refusals = [(desk, r) for desk in desks for r in _drain(desk.refusals)]
        calls = [self._call(s) for s in sendings]
        calls += [self._answer(desk, refusal) for desk, refusal in refusals]
        calls += _drain(self._recalls)
        if calls:
            results = await run(self._redis, calls)
            for sending, result in zip(sendings, results, strict=False):
                await self._released(sending, result)
            for result in results[len(sendings) :]:
                if isinstance(result, Exception):
                    raise result
        await self._commands(desks)
        for promotion in _drain(self._promotions):
            await self._promote(promotion)

    def _call(self, s: Sending, *, strict: bool = True) -> Call:
        keys = " ".join(e.key for e in s.entries)
        return Call(
            RELEASE,
            (
                self._lease.fence_key,
                names.requests(s.desk.model),
                names.batches(s.replica),
                names.replica(s.replica),
                names.DECISIONS,
            ),
            (
                *(self._lease.token, s.incarnation, int(strict), names.GROUP_DISPATCHER),
                *(self._kept, s.batch_id, s.desk.model, keys, f"{s.released:.6f}"),
                *(s.numbers, s.batch),
                *(e.stream_id for e in s.entries),
            ),
        )

    def _answer(self, desk: Desk, refusal: Refusal) -> Call:
        entry, reply = refusal.entry, refusal.reply
        if isinstance(reply, Failed):
            self._counters.refused.labels(desk.model, reply.code).inc()
        else:
            self._counters.cancelled.labels(desk.model).inc()
        return Call(
            ANSWER,
            (
                self._lease.fence_key,
                names.requests(desk.model),
                names.replies(entry.gateway),
                names.gateway_alive(entry.gateway),
                names.DECISIONS,
            ),
            (
                self._lease.token,
                names.GROUP_DISPATCHER,
                entry.stream_id,
                b"" if reply is None else encode(reply),
                *(self._kept, desk.model, entry.key),
                f"{reply.message} ({reply.status})" if isinstance(reply, Failed) else "",
            ),
        )

    async def _released(self, s: Sending, result: Any) -> None:
        if isinstance(result, Exception):
            raise result
        outcome = result[0]
        if outcome == b"ok":
            self._count_released(s)
        elif outcome == b"replica":
            log.info("%s takes nothing now (%s): requeued", s.replica, result[1].decode() or "-")
            s.desk.put_back(s.entries, s.replica, self._clock())
        else:
            await self._release_rest(s, set(result[1:]))

    async def _release_rest(self, s: Sending, missing: set[bytes]) -> None:
        """Some entries are gone from Redis (it lost data): send the others."""
        log.warning("%d released requests were no longer in Redis", len(missing))
        s.desk.vanished([e for e in s.entries if e.stream_id in missing], s.replica, self._clock())
        kept = [
            (e, w) for e, w in zip(s.entries, s.waits, strict=True) if e.stream_id not in missing
        ]
        rest = [e for e, _ in kept]
        if not rest:
            return
        batch = Batch(
            id=s.batch_id,
            released=s.released,
            queued=tuple(e.queued for e in rest),
            requests=tuple(e.body for e in rest),
        )
        waits = [w for _, w in kept]
        again = msgspec.structs.replace(s, entries=rest, batch=encode(batch), waits=waits)
        (result,) = await run(self._redis, [self._call(again, strict=False)])
        await self._released(again, result)

    def _count_released(self, s: Sending) -> None:
        model, counters = s.desk.model, self._counters
        counters.released.labels(model).inc(len(s.entries))
        counters.batches.labels(model).inc()
        s.desk.demand.outflow.left(len(s.entries), s.released)
        wait, hold = counters.wait.labels(model), counters.hold.labels(model)
        added, done = counters.added.labels(model), self._clock()
        for entry, (waited, held) in zip(s.entries, s.waits, strict=True):
            wait.observe(max(0.0, s.released - entry.queued))
            hold.observe(held)
            added.observe(max(0.0, done - entry.queued - waited))

    async def _commands(self, desks: list[Desk]) -> None:
        cancels = [c for desk in desks for c in _drain(desk.cancels)]
        suspensions = list(_drain(self._suspensions))
        if not cancels and not suspensions:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            for replica, request_id in cancels:
                send_command(pipe, names.control(replica), Cancel(id=request_id), id=request_id)
            for action in suspensions:
                message = SuspendTraining(replicas=action.replicas, wanted=action.wanted)
                send_command(
                    pipe,
                    names.COORDINATOR_CONTROL,
                    message,
                    replicas=" ".join(action.replicas),
                    wanted=str(action.wanted),
                )
            await pipe.execute()

    async def _promote(self, action: Promote) -> None:
        why = ", ".join(f"{k} {v}" for k, v in action.why.items()) or "load needs it"
        try:
            await move(
                self._redis,
                action.replica,
                State.SERVING,
                by="dispatcher",
                why=why,
                expected=frozenset({State.IDLE}),
            )
        except Refused as e:
            log.info("promotion refused: %s", e)


def _limits(entry: Entry, now: float) -> list[float | None]:
    """Seconds: since it came, and its limits of first token, of each further one, of its end."""
    request = entry.request

    def after(moment: float | None) -> float | None:
        return None if moment is None else round(moment - request.arrival, 4)

    return [round(now - request.arrival, 4), after(request.ttft_deadline), request.tpot,
            after(request.deadline)]  # fmt: skip


def _drain(items: list[Any]) -> Iterator[Any]:
    """The items so far; the list is empty afterwards."""
    taken, items[:] = items[:], []
    return iter(taken)
