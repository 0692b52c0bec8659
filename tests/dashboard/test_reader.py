"""The readers against a real Redis and a real HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from collm.dashboard import reader, views
from collm.dashboard.history import History
from collm.dashboard.reader import GatewayReader, Reader
from collm.redis_server import RedisServer
from shared import names, sessions
from shared.redis_client import connect
from tests.dashboard import scene

EXPOSITION = """# HELP collm_slo_requests_total Ended requests that named a SLO
# TYPE collm_slo_requests_total counter
collm_slo_requests_total{engine="torch",met="true",model_name="m"} 7.0
collm_slo_requests_total{engine="torch",met="false",model_name="m"} 2.0
collm_slo_requests_total{engine="torch",met="true",model_name="a"} 1.0
# TYPE collm_slo_attainment gauge
collm_slo_attainment{engine="torch",model_name="m"} 0.5
"""


@pytest.fixture
async def reading_user(redis: Redis, redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A client that Redis lets read and nothing else."""
    await redis.execute_command(
        *("ACL", "SETUSER", "viewer", "reset", "on", ">secret", "~collm:*"),
        *("-@all", "+@read", "+@connection", "+time"),
    )
    address = redis_server.url.replace("redis://", "redis://viewer:secret@")
    client = connect(address)
    yield client
    await client.aclose()
    await redis.execute_command("ACL", "DELUSER", "viewer")


async def test_a_user_who_may_only_read_sees_everything(
    redis: Redis, reading_user: Redis, tmp_path: Path
) -> None:
    await scene.replicas(redis)
    await scene.adapters(redis, tmp_path)
    session_id = await scene.rounds(redis)
    await scene.steps(redis)
    history = History()
    await Reader(reading_user, history).look()
    now = await scene.now(redis)
    assert history.away is None
    assert [lane.state for lane in views.lanes(history, now, 300)].count("combined") == 3
    assert views.lanes(history, now, 300)[4].state == "dead"
    assert history.snapshot.queued == {scene.MODEL: 7}
    assert {a.name for a in views.adapters(history)} == {"support", "legal-de"}
    (view,) = views.session_views(history, now)
    assert view.id == session_id
    assert set(view.steps) == set(scene.CLIENTS)
    assert len(view.heldout) == 3
    assert history.damaged == 0


async def test_a_second_look_takes_nothing_twice(redis: Redis) -> None:
    await scene.replicas(redis)
    await scene.steps(redis)
    history = History()
    looker = Reader(redis, history)
    await looker.look()
    events, tokens = len(history.events), _tokens(history)
    await looker.look()
    assert (len(history.events), _tokens(history)) == (events, tokens)
    assert tokens == sum(80 + 10 * i for i in range(5))


def _tokens(history: History) -> float:
    first = history.rates.first or 0.0
    return sum(g[2]["tokens"] for g in history.rates.grouped(first, first + 60, 60))


async def test_damaged_records_are_counted_and_the_rest_is_shown(redis: Redis) -> None:
    await scene.replicas(redis)
    await redis.xadd(names.METRICS, {"body": b"\xff rubbish"})
    await redis.sadd(names.SESSIONS, "broken")
    await redis.hset(names.session("broken"), "round", "no number")
    await redis.sadd(names.ADAPTERS, "broken")
    await redis.hset(names.adapter("broken"), "rank", "high")
    await redis.sadd(names.MODELS, "broken")
    await redis.hset(names.model("broken"), "context", "long")
    await redis.hset(names.demand(scene.MODEL), "rate", "fast")
    history = History()
    await Reader(redis, history).look()
    assert history.damaged == 5
    assert len(history.snapshot.replicas) == 5


async def test_a_session_that_ended_before_the_dashboard_began_is_read(redis: Redis) -> None:
    session_id = await scene.rounds(redis)
    session = await sessions.read(redis, session_id)
    assert session is not None
    await redis.set("fence", "1")
    await sessions.end(redis, session, "loss falls no more", "fence", "1")
    history = History()
    await Reader(redis, history).look()
    (view,) = views.session_views(history, await scene.now(redis))
    assert (view.phase, view.ended) == ("ended", "loss falls no more")


def test_the_counters_are_summed_over_models() -> None:
    assert reader.counters(EXPOSITION) == (8.0, 2.0)
    assert reader.counters("") == (0.0, 0.0)


async def test_a_gateway_that_is_away_is_said_and_taken_up_again() -> None:
    answers = [b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"]
    body = EXPOSITION.encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    answers.append(head.encode() + body)

    async def answer(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        await incoming.readuntil(b"\r\n\r\n")
        outgoing.write(answers.pop(0))
        await outgoing.drain()
        outgoing.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    history = History()
    gateway = GatewayReader((address,), history, lambda: 1000.0)
    async with server, httpx.AsyncClient(trust_env=False) as client:
        assert history.gateways[address] == "not asked yet"
        await gateway.look(client, address)
        assert "500" in (history.gateways[address] or "")
        await gateway.look(client, address)
        assert history.gateways[address] is None
    async with httpx.AsyncClient(trust_env=False) as client:
        await gateway.look(client, address)
    assert history.gateways[address] is not None


async def test_all_gateways_behind_a_name_are_counted_each_for_itself() -> None:
    body = EXPOSITION.encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"

    async def answer(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        await incoming.readuntil(b"\r\n\r\n")
        outgoing.write(head.encode() + body)
        await outgoing.drain()
        outgoing.close()

    first = await asyncio.start_server(answer, "127.0.0.1", 0)
    second = await asyncio.start_server(answer, "127.0.0.1", 0)
    pods = [f"127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in (first, second)]

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("gateways", 8000)
        if not pods:
            raise OSError("no such name")
        return list(pods)

    history = History()
    name = "dns+http://gateways:8000"
    gateway = GatewayReader((name,), history, lambda: 1000.0, resolve=resolve)
    async with first, second, httpx.AsyncClient(trust_env=False) as client:
        await gateway.look_at_all(client)
        assert history.gateways == dict.fromkeys((f"http://{p}" for p in pods), None)
        gone = pods.pop()
        await gateway.look_at_all(client)
        assert f"http://{gone}" not in history.gateways
        pods.clear()
        await gateway.look_at_all(client)
        assert list(history.gateways) == [name]
        assert "no such name" in (history.gateways[name] or "")


async def test_a_name_resolves_to_addresses_with_the_port() -> None:
    assert "127.0.0.1:8000" in await reader._resolve("127.0.0.1", 8000)
    assert await reader._resolve("::1", 8000) == ["[::1]:8000"]
