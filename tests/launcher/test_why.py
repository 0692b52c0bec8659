"""``collm why``: every decision about a replica or a request is found again with its numbers."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from typer.testing import CliRunner

from collm.cli import build
from collm.redis_server import RedisServer
from shared import names
from shared.records import ReplicaRecord
from shared.replica_state import State, event, move


async def run(*arguments: str) -> tuple[int, str]:
    found = await asyncio.to_thread(CliRunner().invoke, build(), ["why", *arguments])
    return found.exit_code, found.output


async def test_why_a_replica_is_idle_is_one_command(
    redis: Redis, redis_server: RedisServer
) -> None:
    record = ReplicaRecord(id="replica-2", model="m", state="serving")
    await redis.hset(names.replica("replica-2"), mapping=record.to_hash())
    why = "idle: U=0.012 U_switch=0.25 b=0.1 b_switch=1 rest_carries=9.1 needed=0.2 T=30"
    await move(redis, "replica-2", State.IDLE, by="launcher", why=why)
    await event(redis, "round_began", clients="replica-1,replica-2", round=4)
    await event(redis, "client_failed", replica="replica-1", why="of another replica")
    code, text = await run("replica-2", "--redis", redis_server.url)
    assert code == 0
    assert "replica-2 is idle since" in text
    assert text.count("U_switch=0.25") == 2  # in the summary and in its event
    assert "round_began" in text
    assert "of another replica" not in text


async def test_why_a_request_went_where_it_went(redis: Redis, redis_server: RedisServer) -> None:
    release = {
        "batch": "b1",
        "model": "m",
        "replica": "replica-0",
        "requests": "req-1.0/1 req-2.0/1",
        "released": "1.0",
        "numbers": '{"slack":0.4}',
    }
    await redis.xadd(names.DECISIONS, release)
    await redis.xadd(names.DECISIONS, {**release, "requests": "req-10.0/1", "batch": "b2"})
    code, text = await run("req-1", "--redis", redis_server.url)
    assert code == 0
    assert "released to replica-0 in batch b1" in text
    assert '"slack":0.4' in text
    assert "b2" not in text
    code, text = await run("nobody", "--redis", redis_server.url)
    assert code == 1
