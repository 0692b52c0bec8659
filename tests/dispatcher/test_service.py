"""The dispatcher service over a real Redis, with a scripted gateway and scripted replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared import names
from shared.messages import BODY, Cancel, Failed, Lost, Sampling, encode
from shared.redis_client import connect
from shared.replica_state import State, move
from tests.dispatcher.peers import (
    MODEL,
    ScriptedGateway,
    ScriptedReplica,
    drained,
    eventually,
    running,
)


async def _state(redis: Redis, replica: str) -> str:
    return (await redis.hget(names.replica(replica), "state")).decode()


async def _events(redis: Redis, kind: str) -> list[dict[str, str]]:
    entries = [fields for _, fields in await redis.xrange(names.EVENTS)]
    plain = [{k.decode(): v.decode() for k, v in fields.items()} for fields in entries]
    return [event for event in plain if event["kind"] == kind]


async def test_a_request_moves_from_its_stream_into_exactly_one_replicas(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, a, b = ScriptedGateway(redis), ScriptedReplica(redis, "a"), ScriptedReplica(redis, "b")
    await gateway.start()
    await a.start()
    await b.start()
    async with running(redis_server.url):
        for i in range(6):
            await gateway.send(f"q{i}")

        async def all_there() -> bool:
            return len(await a.ids()) + len(await b.ids()) == 6

        await eventually(all_there, "six requests released")
        assert sorted(await a.ids() + await b.ids()) == [f"q{i}" for i in range(6)]
        assert len(await a.ids()) == 3, "least loaded shares evenly"
        assert await drained(redis)


async def test_credit_is_bounded_and_comes_back_with_completions(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=2)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        for i in range(5):
            await gateway.send(f"q{i}")
        done: list[str] = []
        while len(done) < 5:
            expected = min(2, 5 - len(done))

            async def full(n: int = expected) -> bool:
                return len(await replica.ids()) >= n

            await eventually(full, "the replica is full")
            assert len(await replica.ids()) <= 2
            done += await replica.finish_all()
        assert done == [f"q{i}" for i in range(5)], "first come, first served"


async def test_start_order_does_not_matter(redis: Redis, redis_server: RedisServer) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis)
    await gateway.start()
    await gateway.send("early")
    async with running(redis_server.url):
        await replica.start()
        await eventually(replica.ids, "released once a replica is there")


async def test_a_second_dispatcher_takes_over_what_the_first_had_pending(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url) as first:
        for i in range(3):
            await gateway.send(f"q{i}")
        await eventually(replica.ids, "the first is released")
        assert first.active is not None
        desk = first.active.desks[MODEL]

        async def two_wait() -> bool:
            return len(desk.waiting) == 2

        await eventually(two_wait, "two wait")
    async with running(redis_server.url) as second:

        async def restored() -> bool:
            active = second.active
            return active is not None and MODEL in active.desks and bool(active.desks[MODEL].flying)

        await eventually(restored, "the second dispatcher knows what is in flight")
        assert await replica.ids() == ["q0"], "the credit of the request in flight still counts"
        done = await replica.finish_all()
        while len(done) < 3:
            await eventually(replica.ids, "the rest is released")
            done += await replica.finish_all()
        assert done == ["q0", "q1", "q2"]
        assert await drained(redis)


async def test_a_standby_takes_over_when_the_lease_of_a_crashed_one_runs_out(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis)
    await gateway.start()
    await replica.start()
    # A holder that crashed: its lease runs out by itself.
    await redis.set(names.lease("dispatcher"), "crashed", px=1500)
    await gateway.send("q")
    async with running(redis_server.url) as standby:
        await asyncio.sleep(0)
        assert standby.active is None
        await eventually(replica.ids, "released by the standby")


async def test_a_dispatcher_that_lost_its_lease_releases_nothing_more(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url) as former:

        async def acts() -> bool:
            return former.active is not None and MODEL in former.active.desks

        await eventually(acts, "it acts")
        await redis.set(names.lease("dispatcher"), "another", px=60_000)
        await redis.set(names.fence("dispatcher"), "99999999999999999")
        await gateway.send("q")

        async def stands_by() -> bool:
            return former.active is None

        await eventually(stands_by, "it stands by")
        assert await replica.ids() == []
        assert await redis.xlen(names.requests(MODEL)) == 1, "the request is still queued"


async def test_a_cancelled_request_leaves_the_queue_or_is_cancelled_on_its_replica(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("runs")
        await gateway.send("waits")
        await eventually(replica.ids, "the first is released")
        await gateway.cancel("waits")

        async def queue_empty() -> bool:
            return await drained(redis)

        await eventually(queue_empty, "the queued one is gone")
        await gateway.cancel("runs")
        commands = await eventually(replica.commands, "the replica is told")
        assert commands == [Cancel(id="runs")]
        await replica.finish_all()
        await gateway.send("next")
        await eventually(replica.ids, "credit is back")
        assert await replica.ids() == ["next"]


async def test_a_dead_replicas_requests_are_reported_lost_and_its_stream_is_emptied(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway = ScriptedGateway(redis)
    replica, other = ScriptedReplica(redis, "a"), ScriptedReplica(redis, "b", b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("q")
        await eventually(replica.ids, "released")
        await other.start()
        await replica.die()
        replies = await eventually(gateway.replies, "the gateway is told")
        assert replies == [Lost(id="q", attempt=1, replica="a")]
        assert await _state(redis, "a") == State.DEAD
        assert await replica.ids() == []
        (told,) = await eventually(lambda: _events(redis, "lost"), "the audit log is told")
        assert (told["replica"], told["requests"], told["why"]) == ("a", "1", "heartbeat lost")
        await gateway.send("q", attempt=2, generated=(7,))
        await eventually(other.ids, "the second attempt goes elsewhere")


async def test_what_a_replica_left_that_says_itself_it_is_dead_is_told_as_lost(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, "a")
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("q")
        await eventually(replica.ids, "released")
        await move(redis, "a", State.DEAD, by="a", why="its inference process died")
        (told,) = await eventually(lambda: _events(redis, "lost"), "the audit log is told")
        assert (told["replica"], told["requests"], told["by"]) == ("a", "1", "dispatcher")


async def test_a_missed_sample_is_noticed_by_its_number_and_the_books_are_compared(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url) as dispatcher:
        await gateway.send("first")
        await gateway.send("second")
        await eventually(replica.ids, "released")
        await replica.sample([])
        await replica.finish_all(tell=False)
        await replica.sample([])

        async def second_there() -> bool:
            return await replica.ids() == ["second"]

        await eventually(second_there, "credit came back without a completion")
        counted = dispatcher._counters.registry.get_sample_value
        assert counted("collm_dispatcher_reconciled_total") == 1


async def test_a_poisoned_entry_goes_to_dead_letters_and_the_next_is_served(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        stream = names.requests(MODEL)
        await redis.xadd(stream, {"id": "bad", "gateway": gateway.name, "arrival": "nan"})
        await redis.xadd(stream, {b"\xff": b"\xff"})
        await redis.xadd(names.dispatcher_control(MODEL), {BODY: encode(Cancel(id="x"))[:3]})
        await gateway.send("good")
        await eventually(replica.ids, "the good one is released")

        async def buried() -> bool:
            return bool(await redis.xlen(names.DEAD_LETTERS) == 3)

        await eventually(buried, "all three are buried")
        (told,) = [r for r in await gateway.replies() if isinstance(r, Failed)]
        assert (told.id, told.status) == ("bad", 500)
        assert await drained(redis)


async def test_a_request_that_no_replica_can_carry_fails_with_the_reason(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, context=16)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("long", sampling=Sampling(max_tokens=100))
        (reply,) = await eventually(gateway.replies, "refused")
        assert reply.code == "context_length_exceeded"
        assert reply.status == 400
        assert "103 tokens" in reply.message
        assert "16" in reply.message
        assert await drained(redis)


async def test_requests_of_a_gateway_that_is_gone_are_dropped(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("runs")
        await gateway.send("waits")
        await eventually(replica.ids, "released")
        await redis.xadd(names.replies(gateway.name), {"body": "x"})
        await redis.delete(names.gateway_alive(gateway.name))
        assert await eventually(replica.commands, "cancelled") == [Cancel(id="runs")]
        await replica.finish_all()

        async def clean() -> bool:
            gone = not await redis.exists(names.replies(gateway.name))
            return gone and await drained(redis)

        await eventually(clean, "queue and reply stream are gone")
        assert await replica.ids() == []


async def test_groups_come_back_after_redis_lost_its_data(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("before")
        await eventually(replica.ids, "released")
        await redis.flushall()
        await gateway.start()
        await replica.start()
        await gateway.send("after")

        async def there() -> bool:
            return await replica.ids() == ["after"]

        await eventually(there, "served again")


async def test_a_restart_of_redis_is_waited_out(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    redis = connect(server.url)
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1)
    await gateway.start()
    await replica.start()
    async with running(server.url) as dispatcher:
        await gateway.send("first")
        await gateway.send("second")
        await eventually(replica.ids, "released")

        async def second_read() -> bool:
            return (await redis.xpending(names.requests(MODEL), "dispatcher"))["pending"] == 1

        await eventually(second_read, "the second is pending")
        server.kill()

        async def red() -> bool:
            return dispatcher.leader.ready() is not None

        await eventually(red, "red while Redis is away")
        server.start()
        await redis.connection_pool.disconnect()  # the test's own connections died, too

        async def green() -> bool:
            return dispatcher.leader.ready() is None

        await eventually(green, "green again")
        assert await replica.finish_all() == ["first"]
        await eventually(replica.ids, "the second follows")
        assert await replica.ids() == ["second"]
    await redis.aclose()
    server.stop()


async def test_health_and_metrics_are_served_over_http(
    redis: Redis, redis_server: RedisServer
) -> None:
    replica = ScriptedReplica(redis)
    await replica.start()
    async with running(redis_server.url) as dispatcher, httpx.AsyncClient() as client:

        async def acts() -> bool:
            return dispatcher.active is not None and dispatcher.leader.ready() is None

        await eventually(acts, "it acts")
        base = f"http://127.0.0.1:{dispatcher.leader.port}"
        assert (await client.get(f"{base}/health/live")).status_code == 200
        assert (await client.get(f"{base}/health/ready")).status_code == 200
        assert "collm_dispatcher_active 1.0" in (await client.get(f"{base}/metrics")).text
        assert (await client.get(f"{base}/nothing")).status_code == 404
