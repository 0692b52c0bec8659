"""Taking a released request back: nothing lost, nothing twice, whoever is faster."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from services.dispatcher.desk import Desk
from services.dispatcher.entries import Entry
from services.dispatcher.policies.base import Action, Completion, Preempt, Request
from services.dispatcher.policies.least_loaded import LeastLoaded
from services.dispatcher.service import Dispatcher
from shared import names
from shared.messages import BODY, Cancel, Finished, Lost, StepSample, encode
from tests.dispatcher.peers import (
    MODEL,
    ScriptedGateway,
    ScriptedReplica,
    drained,
    eventually,
    running,
)

ENTRY = Entry(
    id="q",
    attempt=1,
    gateway="g",
    stream_id=b"1-0",
    body=b"",
    queued=0.0,
    request=Request(id="q/1", arrival=0.0, prompt_tokens=1, max_tokens=1),
)
COPY = msgspec.structs.replace(ENTRY, stream_id=b"2-0", taken_from="r")


def _desk_with_recall() -> Desk:
    desk = Desk(MODEL, LeastLoaded(), 10)
    desk.arrive(ENTRY, 0.0)
    desk.take(["q/1"], "r", 0.0)
    assert desk.recall(["q/1"], "r") == [ENTRY]
    assert desk.recall(["q/1"], "r") == [], "taken back once"
    return desk


def _ended(reason: str, tokens: int) -> Completion:
    return Completion(id="q/1", replica="r", output_tokens=tokens, reason=reason)


def _orders(desk: Desk, completion: Completion, *, copy_first: bool) -> Sequence[object]:
    if copy_first:
        desk.arrive(COPY, 0.1)
        desk.finish(completion, 0.2)
    else:
        desk.finish(completion, 0.1)
        desk.arrive(COPY, 0.2)
    return [refusal.reply for refusal in desk.refusals]


def test_a_request_that_had_not_begun_is_queued_again_in_either_order() -> None:
    for copy_first in (True, False):
        desk = _desk_with_recall()
        assert _orders(desk, _ended("cancelled", 0), copy_first=copy_first) == []
        assert list(desk.waiting) == ["q/1"]


def test_a_request_that_ended_after_all_is_not_served_twice() -> None:
    for copy_first in (True, False):
        desk = _desk_with_recall()
        assert _orders(desk, _ended("stop", 5), copy_first=copy_first) == [None]
        assert not desk.waiting


def test_a_request_that_had_begun_is_continued_by_its_gateway() -> None:
    for copy_first in (True, False):
        desk = _desk_with_recall()
        replies = _orders(desk, _ended("cancelled", 3), copy_first=copy_first)
        assert replies == [Lost(id="q", attempt=1, replica="r", preempted=True)]


def test_a_client_that_goes_away_during_preemption_is_not_served() -> None:
    desk = _desk_with_recall()
    desk.arrive(COPY, 0.1)
    desk.cancel("q", 0.2)
    desk.finish(_ended("cancelled", 0), 0.3)
    assert not desk.waiting
    assert [r.entry for r in desk.refusals] == [COPY]


def test_a_copy_found_after_a_crash_goes_back_to_its_gateway() -> None:
    desk = Desk(MODEL, LeastLoaded(), 10)
    desk.arrive(COPY, 0.0)
    assert [r.reply for r in desk.refusals] == [
        Lost(id="q", attempt=1, replica="r", preempted=True)
    ]


class _TakesBackOnce(LeastLoaded):
    """Takes the first released request back in the next decision."""

    taken = False

    def decide(self, now: float) -> list[Action]:
        actions = super().decide(now)
        flying = [(m.view.id, key) for m in self.fleet for key in m.flight]
        if flying and not actions and not self.taken:
            self.taken = True
            replica, key = flying[0]
            actions.append(Preempt(replica=replica, requests=(key,)))
        return actions


async def _cancelled(replica: ScriptedReplica) -> None:
    """Do what a replica does with a Cancel for a request that has not begun."""
    ((entry_id, _),) = await replica.batches()
    finished = (Finished("q", 1, 3, 0, "cancelled"),)
    sample = StepSample(
        replica=replica.name, model=MODEL, incarnation=replica.record.incarnation,
        seq=1, time=0.0, seconds=0.0, b=0, finished=finished,
    )  # fmt: skip
    await replica.redis.xdel(names.batches(replica.name), entry_id)
    await replica.redis.xadd(names.METRICS, {"kind": "step_sample", BODY: encode(sample)})


async def test_a_preempted_request_is_queued_and_released_again(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url) as dispatcher:
        await _use(dispatcher, _TakesBackOnce())
        await gateway.send("q")
        assert await eventually(replica.commands, "cancelled") == [Cancel(id="q")]
        assert await redis.xlen(names.requests(MODEL)) == 1, "the copy is queued"
        await _cancelled(replica)
        await eventually(replica.ids, "released again")
        assert await replica.ids() == ["q"]
        assert await drained(redis)


async def _use(dispatcher: Dispatcher, policy: _TakesBackOnce) -> None:
    async def open_desk() -> Desk | None:
        active = dispatcher.active
        ready = dispatcher.leader.ready() is None
        return active.desks.get(MODEL) if active is not None and ready else None

    desk = await eventually(open_desk, "the desk is open")
    for view in desk.replicas.values():
        policy.on_replica(view, 0.0)
    desk.policy = policy
