"""What is read twice, late, out of order or never seen at the start, over a real Redis."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import Counter
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from services.dispatcher.active import Active
from services.dispatcher.desk import Desk
from services.dispatcher.entries import Entry, Flight
from services.dispatcher.housekeeping import Housekeeping
from services.dispatcher.intake import Intake
from services.dispatcher.policies.base import Request
from services.dispatcher.policies.least_loaded import LeastLoaded
from services.dispatcher.service import Dispatcher
from services.dispatcher.watch import Trust
from shared import names
from shared.clock import RedisClock
from shared.lease import Lease
from shared.messages import Lost, Sampling
from shared.redis_client import ensure_group
from shared.replica_state import State, move
from tests.dispatcher.peers import (
    MODEL,
    ScriptedGateway,
    ScriptedReplica,
    drained,
    eventually,
    running,
)

REQUESTS = names.requests(MODEL)


async def _active(dispatcher: Dispatcher) -> Active:
    async def ready() -> Active | None:
        active = dispatcher.active
        return active if active is not None and dispatcher.leader.ready() is None else None

    found = await eventually(ready, "it acts")
    assert isinstance(found, Active)
    return found


async def _intake(redis: Redis, seen: list[Entry]) -> Intake:
    lease, clock = Lease(redis, "dispatcher"), RedisClock()
    assert await lease.try_acquire()
    await clock.synchronise(redis)

    def take(model: str, entry: Entry) -> None:
        seen.append(entry)

    intake = Intake(redis, lease, clock, 10, take, lambda model, request_id: None)
    await intake.add(MODEL)
    return intake


async def _foreign_read(redis: Redis) -> None:
    """Another consumer reads what is next."""
    await redis.xreadgroup(names.GROUP_DISPATCHER, "former", {REQUESTS: ">"}, count=1)


async def test_a_claim_takes_what_another_has_and_not_what_lies_between(redis: Redis) -> None:
    gateway, seen = ScriptedGateway(redis), list[Entry]()
    intake = await _intake(redis, seen)
    await intake.recover()
    await gateway.send("theirs-1")
    await _foreign_read(redis)
    await gateway.send("own")
    await intake.read()
    await gateway.send("theirs-2")
    await _foreign_read(redis)
    assert await intake.claim() == 2
    assert [(e.id, e.request.fresh) for e in seen] == [
        ("own", True),
        ("theirs-1", False),
        ("theirs-2", False),
    ]
    assert (await redis.xpending(REQUESTS, names.GROUP_DISPATCHER))["pending"] == 3


async def test_what_waited_before_a_dispatcher_acted_is_not_fresh(redis: Redis) -> None:
    gateway, seen = ScriptedGateway(redis), list[Entry]()
    intake = await _intake(redis, seen)
    await gateway.send("read-by-another")
    await _foreign_read(redis)
    await gateway.send("unread")

    async def a_millisecond_later() -> bool:
        seconds, micros = await redis.time()
        (entry_id, _), *_ = await redis.xrevrange(REQUESTS, count=1)
        return bool(seconds * 1000 + micros // 1000 > int(entry_id.split(b"-")[0]) + 5)

    await eventually(a_millisecond_later, "Redis's clock goes on")
    assert await intake.recover() == 1
    await intake.read()
    await gateway.send("new")
    await intake.read()
    assert [(e.id, e.request.fresh) for e in seen] == [
        ("read-by-another", False),
        ("unread", False),
        ("new", True),
    ]


async def test_a_waiting_request_survives_that_a_claim_reads_it_again(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url) as dispatcher:
        desk = (await _active(dispatcher)).desks[MODEL]
        await gateway.send("runs")
        await gateway.send("waits")

        async def waits() -> bool:
            return "waits/1" in desk.waiting

        await eventually(waits, "one waits")
        (entry_id, fields), *_ = await redis.xrevrange(REQUESTS, count=1)
        await gateway.send("next")  # its arrival shows that the one before it was handled

        async def both_wait() -> bool:
            return len(desk.waiting) == 2

        await eventually(both_wait, "two wait")
        active = dispatcher.active
        assert active is not None
        await active._intake._request(REQUESTS.encode(), MODEL, entry_id, fields, 0.0, fresh=False)
        assert await replica.finish_all() == ["runs"]
        await eventually(replica.ids, "the one that was read twice is released")
        assert await replica.ids() == ["waits"]
        assert await replica.finish_all() == ["waits"]
        await eventually(replica.ids, "and the next")
        assert await drained(redis)


async def test_a_cancel_that_overtakes_its_request_holds(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=8, b_max=8)
    await gateway.start()
    await replica.start()
    await ensure_group(redis, REQUESTS, names.GROUP_DISPATCHER)
    for i in range(5):
        await gateway.send(f"q{i}")
    for i in (1, 3, 4):
        await gateway.cancel(f"q{i}")
    async with running(redis_server.url, read_count=1):

        async def queue_empty() -> bool:
            return await drained(redis)

        await eventually(queue_empty, "all are read")
        assert await redis.xlen(names.dispatcher_control(MODEL)) == 0
        assert "q4" not in await replica.ids()
        assert set(await replica.ids()) <= {"q0", "q1", "q2", "q3"}
        cancelled = {command.id for command in await replica.commands()}
        assert {"q1", "q3"} & set(await replica.ids()) <= cancelled


async def test_released_requests_that_redis_has_lost_hold_up_nobody(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=2)
    await gateway.start()
    for key in ("x", "y", "lost", "kept"):
        await gateway.send(key)
    await replica.start()
    async with running(redis_server.url) as dispatcher:

        async def two() -> bool:
            return await replica.ids() == ["x", "y"]

        await eventually(two, "two are released together")
        desk = (await _active(dispatcher)).desks[MODEL]
        (entry_id, _), *_ = await redis.xrange(REQUESTS)
        await redis.xack(REQUESTS, names.GROUP_DISPATCHER, entry_id)
        await redis.xdel(REQUESTS, entry_id)
        await replica.finish_all()
        await eventually(replica.ids, "what is left of the next two is released")
        assert await replica.ids() == ["kept"]

        async def books() -> bool:
            return not desk.waiting and list(desk.flying) == ["kept/1"]

        await eventually(books, "the books agree")
        assert await drained(redis)


async def test_a_replica_whose_heartbeat_was_away_at_the_start_keeps_what_it_has(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("runs")
        await eventually(replica.ids, "released")
    await replica.die()
    async with running(redis_server.url) as dispatcher:
        active = await _active(dispatcher)
        assert not active.desks[MODEL].flying
        await gateway.send("next")
        await replica.beat()
        desk = active.desks[MODEL]

        async def seen() -> bool:
            return replica.name in desk.replicas

        await eventually(seen, "it is seen")
        assert list(desk.flying) == ["runs/1"]

        async def waits() -> bool:
            return "next/1" in desk.waiting

        await eventually(waits, "the next one is read")
        assert await replica.ids() == ["runs"], "no credit is left"
        await gateway.cancel("runs")
        assert [c.id for c in await eventually(replica.commands, "forwarded")] == ["runs"]
        await replica.finish_all()
        await eventually(replica.ids, "credit is back")
        assert await replica.ids() == ["next"]


async def test_what_only_a_replica_that_died_could_carry_is_answered(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, small = ScriptedGateway(redis), ScriptedReplica(redis, "small", context=64)
    big = ScriptedReplica(redis, "big", context=1000, b=1)
    await gateway.start()
    await small.start()
    await big.start()
    async with running(redis_server.url) as dispatcher:
        desk = (await _active(dispatcher)).desks[MODEL]
        await gateway.send("runs", sampling=Sampling(max_tokens=100))
        await eventually(big.ids, "released to the one that carries it")
        await gateway.send("waits", sampling=Sampling(max_tokens=100))

        async def waits() -> bool:
            return "waits/1" in desk.waiting

        await eventually(waits, "the next one waits")
        await move(redis, "big", State.DEAD, by="big", why="test")

        async def both_told() -> bool:
            return len(await gateway.replies()) == 2

        await eventually(both_told, "both are told")
        replies = {reply.id: reply for reply in await gateway.replies()}
        assert replies["runs"] == Lost(id="runs", attempt=1, replica="big")
        assert (replies["waits"].status, replies["waits"].code) == (400, "context_length_exceeded")
        assert await drained(redis)


@pytest.mark.parametrize("change", ["state", "incarnation"])
async def test_a_release_that_its_replica_no_longer_takes_goes_elsewhere(
    redis: Redis, redis_server: RedisServer, change: str
) -> None:
    """Between the decision and its flush the replica drains, or is another life of itself."""
    gateway = ScriptedGateway(redis)
    first, other = ScriptedReplica(redis, "a"), ScriptedReplica(redis, "b")
    await gateway.start()
    await first.start()
    async with running(redis_server.url) as dispatcher:
        active = await _active(dispatcher)
        desk, refused = active.desks[MODEL], asyncio.Event()
        flush = active._outbox.flush

        async def late(desks: list[Desk]) -> None:
            decided = bool(active._outbox._sendings)
            if decided and not refused.is_set():
                if change == "state":
                    await move(redis, "a", State.DRAINING, by="operator", why="test")
                else:
                    await redis.hset(names.replica("a"), "incarnation", "another")
                    await redis.set(names.replica_alive("a"), "another")
            await flush(desks)
            if decided and not refused.is_set():
                assert list(desk.waiting) == ["q/1"], "it is put back"
                assert not desk.waiting["q/1"].request.fresh
                assert not desk.flying
                refused.set()

        active._outbox.flush = late  # type: ignore[method-assign]
        await gateway.send("q")
        await asyncio.wait_for(refused.wait(), 60)
        assert await redis.xlen(REQUESTS) == 1, "still queued in Redis"
        if change == "incarnation":  # the new life is gone again before it takes anything
            await move(redis, "a", State.DRAINING, by="test", why="test")
        await other.start()
        await eventually(other.ids, "released to the other one")
        assert await other.ids() == ["q"]
        assert await first.ids() == []
        assert await drained(redis)
        assert [f.replica for f in desk.flying.values()] == ["b"]
        assert sum(desk.demand.outflow._bins.values()) == 1, "what was put back has not left"
        assert await gateway.replies() == []


# ------------------------------------------------------------ a model that opens meanwhile


def _flying_desk(model: str) -> Desk:
    desk = Desk(model, LeastLoaded(), 10)
    request = Request(id="q/1", arrival=0.0, prompt_tokens=1, max_tokens=1)
    entry = Entry(
        id="q", attempt=1, gateway="g", stream_id=b"1-0", body=b"", queued=0.0, request=request
    )
    desk.flying["q/1"] = Flight(entry, "r", 0.0)
    return desk


async def test_a_model_that_opens_during_a_round_of_housekeeping_ends_nothing(
    redis: Redis,
) -> None:
    lease, clock = Lease(redis, "dispatcher"), RedisClock()
    assert await lease.try_acquire()
    counter = Counter("test_reconciled", "", registry=None)
    house = Housekeeping(redis, lease, clock, Trust(), counter)
    desks = {MODEL: _flying_desk(MODEL)}
    round_ = asyncio.create_task(house.round(desks))
    await asyncio.sleep(0)  # it asks Redis now
    assert not round_.done()
    desks["other"] = _flying_desk("other")
    assert await round_ == []


async def test_a_model_that_opens_while_demand_is_told_ends_nothing(
    redis: Redis, redis_server: RedisServer
) -> None:
    replica = ScriptedReplica(redis)
    await replica.start()
    async with running(redis_server.url) as dispatcher:
        active = await _active(dispatcher)
        telling = asyncio.create_task(active._tell_demand())
        await asyncio.sleep(0)  # it writes to Redis now
        assert not telling.done()
        active.desks["other"] = Desk("other", LeastLoaded(), 10)
        await telling
        del active.desks["other"]
        assert await redis.hget(names.demand(MODEL), "released") == b"0.0"
