"""Deaths, hangs and a Redis that goes away: each request ends once, each life is a new one."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared import names
from shared.messages import BODY, Configure, Drain, Lost, encode
from shared.redis_client import connect, ensure_group
from shared.replica_state import State, move
from tests.replica.harness import GATEWAY, Cluster, generate, profile, running, until


async def gateway_lives(redis: Redis) -> None:
    await redis.set(names.gateway_alive(GATEWAY), "1")


async def flowing(cluster: Cluster, request_id: str) -> None:
    async def begun() -> bool:
        return len(await cluster.tokens(request_id)) >= 2

    await until(begun, f"tokens of {request_id}")


async def lost_events(redis: Redis) -> list[dict[bytes, bytes]]:
    entries = [fields for _, fields in await redis.xrange(names.EVENTS)]
    return [fields for fields in entries if fields[b"kind"] == b"lost"]


async def test_a_killed_inference_child_gives_its_requests_back_and_serves_again(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)) as process:
        first = await cluster.serving()
        await gateway_lives(redis)
        await cluster.release(generate("a", tokens=2000), generate("b", tokens=2000))
        await flowing(cluster, "a")
        (child,) = process.children().values()
        child.kill()
        for request in ("a", "b"):
            lost = await cluster.told(Lost, request)
            assert lost.replica == "replica-0"
        second = await cluster.serving(not_incarnation=first.incarnation)
        assert process.popen.poll() is None
        had = await cluster.tokens("a")
        await cluster.release(generate("a", tokens=len(had) + 3, attempt=2, generated=had))
        assert (await cluster.finish("a", attempt=2)).finish == "length"
        assert second.incarnation != first.incarnation
        await cluster.read()
        assert sum(isinstance(r, Lost) for r in cluster.replies) == 2
        (event,) = await lost_events(redis)
        assert (event[b"requests"], event[b"by"]) == (b"2", b"replica-0")
        assert b"SIGKILL" in event[b"why"]


async def test_no_child_outlives_a_killed_parent_and_the_next_process_takes_over(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    path = profile(tmp_path, 0.02)
    with running(redis_server.url, tmp_path, profile=path) as process:
        first = await cluster.serving()
        await gateway_lives(redis)
        await cluster.release(generate("a", tokens=2000))
        await flowing(cluster, "a")
        (child,) = process.children().values()
        process.popen.kill()
        process.popen.wait()
        psutil.wait_procs([child], timeout=5)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        with running(redis_server.url, tmp_path, profile=path):
            await cluster.serving(not_incarnation=first.incarnation)
            await cluster.told(Lost, "a")
            await cluster.release(generate("b"))
            await cluster.finish("b")


async def test_a_stopped_process_that_was_declared_dead_wakes_as_a_new_incarnation(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)) as process:
        first = await cluster.serving()
        await cluster.release(generate("a", tokens=2000))
        await flowing(cluster, "a")
        everyone = [psutil.Process(process.popen.pid), *process.children().values()]
        for one in everyone:
            one.suspend()

        async def silent() -> bool:
            return await redis.get(names.replica_alive("replica-0")) is None

        await until(silent, "heartbeat expires")
        # What the dispatcher does: declare it dead, take its work away.
        await move(redis, "replica-0", State.DEAD, by="dispatcher", why="heartbeat lost")
        for entry, _ in await redis.xrange(names.batches("replica-0")):
            await redis.xack(names.batches("replica-0"), names.GROUP_REPLICA, entry)
            await redis.xdel(names.batches("replica-0"), entry)
        for one in everyone:
            one.resume()
        await cluster.serving(not_incarnation=first.incarnation)
        await cluster.release(generate("b", tokens=4))
        await cluster.finish("b")
        had = len(await cluster.tokens("a"))
        await cluster.release(generate("c", tokens=20))
        await cluster.finish("c")
        assert len(await cluster.tokens("a")) == had
        second = [s for s in await cluster.samples() if s.incarnation != first.incarnation]
        assert [s.seq for s in second] == list(range(1, len(second) + 1))


async def test_heartbeats_stop_while_the_inference_child_hangs_and_it_is_replaced(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)) as process:
        first = await cluster.serving()
        await gateway_lives(redis)
        await cluster.release(generate("a", tokens=2000))
        await flowing(cluster, "a")
        (child,) = process.children().values()
        child.suspend()

        async def silent() -> bool:
            return await redis.get(names.replica_alive("replica-0")) is None

        await until(silent, "heartbeat expires although the parent lives")
        # Nobody declares it dead here: the parent itself replaces the child.
        await cluster.told(Lost, "a")
        await cluster.serving(not_incarnation=first.incarnation)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("way", ["signal", "command"])
async def test_a_drain_finishes_what_runs_and_ends_stopped(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, way: str
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)) as process:
        await cluster.serving()
        await cluster.release(generate("a", tokens=60))
        await flowing(cluster, "a")
        if way == "signal":
            process.popen.send_signal(signal.SIGTERM)
        else:
            await cluster.command(Drain(reason="test"))
        assert (await cluster.finish("a")).finish == "length"
        assert await asyncio.to_thread(process.popen.wait, 20) == 0
        record = await cluster.record()
        assert record.state == "stopped"
        assert await redis.get(names.replica_alive("replica-0")) is None
        await cluster.drained()


async def test_a_second_signal_gives_back_what_runs_and_ends_at_once(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)) as process:
        await cluster.serving()
        await gateway_lives(redis)
        await cluster.release(generate("a", tokens=3000))
        await flowing(cluster, "a")
        process.popen.send_signal(signal.SIGTERM)

        async def drains() -> bool:
            return (await cluster.record()).state == "draining"

        await until(drains, "draining")
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.popen.wait, 15) == 0
        await cluster.told(Lost, "a")
        assert (await cluster.record()).state == "stopped"
        assert [e[b"requests"] for e in await lost_events(redis)] == [b"1"]


async def test_a_redis_restart_in_mid_answer_loses_and_repeats_no_token(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    redis = connect(server.url)
    try:
        cluster = Cluster(redis)
        path = profile(tmp_path, 0.01)
        with running(server.url, tmp_path / "data", profile=path) as process:
            await cluster.serving()
            await cluster.release(generate("a", tokens=300))
            await flowing(cluster, "a")
            server.kill()
            await asyncio.sleep(0.5)  # the outage itself
            server.start()
            await redis.connection_pool.disconnect()
            await cluster.finish("a", seconds=60)
            assert len(await cluster.tokens("a")) == 300
            await cluster.drained()
            await cluster.release(generate("b"))
            await cluster.finish("b")
            assert process.popen.poll() is None
    finally:
        await redis.aclose()
        server.stop()


async def test_a_redis_that_comes_back_empty_gets_groups_and_record_again(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)):
        first = await cluster.serving()
        await redis.flushall()
        again = await cluster.serving()
        assert again.incarnation == first.incarnation

        async def card() -> bool:
            known = await redis.sismember(names.MODELS, "m")
            return bool(known) and await redis.hget(names.model("m"), "engine") == b"emulated"

        await until(card, "the model's card is back")
        await cluster.release(generate("a"))
        await cluster.finish("a")
        await cluster.drained()


async def test_two_processes_with_one_id_the_second_refuses_to_start(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    path = profile(tmp_path, 0.02)
    with running(redis_server.url, tmp_path, profile=path):
        first = await cluster.serving()
        with running(redis_server.url, tmp_path / "other", profile=path) as second:
            assert await asyncio.to_thread(second.popen.wait, 20) == 1
            assert "is in use by process" in second.log.read_text()
        assert (await cluster.serving()).incarnation == first.incarnation


async def test_work_for_a_gateway_that_is_gone_stops(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)):
        await cluster.serving()
        await redis.set(names.gateway_alive(GATEWAY), "1", px=3000)
        await cluster.release(generate("a", tokens=4000))
        await flowing(cluster, "a")
        started = time.monotonic()
        assert await cluster.left("a") == "cancelled"
        assert time.monotonic() - started > 1

        async def removed() -> bool:
            return not await redis.exists(names.replies(GATEWAY))

        await until(removed, "reply stream removed")


async def test_a_bad_profile_ends_the_start_at_once_and_is_named(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\n")
    with running(redis_server.url, tmp_path, profile=bad) as process:
        assert await asyncio.to_thread(process.popen.wait, 30) == 1
        text = process.log.read_text()
        assert "bad.yaml" in text
        assert "Traceback" not in text
    assert (await Cluster(redis).record()).state == "dead"


async def test_a_child_that_dies_too_often_makes_the_replica_give_up(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    path = profile(tmp_path, 0.02)
    with running(redis_server.url, tmp_path, profile=path, restarts=1) as process:
        first = await cluster.serving()
        (child,) = process.children().values()
        child.kill()
        await cluster.serving(not_incarnation=first.incarnation)
        (child,) = process.children().values()
        child.kill()
        assert await asyncio.to_thread(process.popen.wait, 20) == 1
        assert "2 times within 10 minutes" in process.log.read_text()
    assert (await cluster.record()).state == "dead"


async def test_a_command_read_but_not_carried_out_by_a_killed_child_is_obeyed_by_the_next(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    stream = names.control("replica-0")
    await ensure_group(redis, stream, names.GROUP_REPLICA)
    await redis.xadd(stream, {BODY: encode(Configure(b=3))})
    await redis.xreadgroup(names.GROUP_REPLICA, "inference", {stream: ">"})
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)):
        await cluster.serving()

        async def obeyed() -> bool:
            return (await cluster.record()).b == 3 and await redis.xlen(stream) == 0

        await until(obeyed, "b = 3")
