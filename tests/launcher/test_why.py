"""``collm why``: every decision about a replica or a request is found again with its numbers."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from typer.testing import CliRunner

from collm.cli import build
from collm.redis_server import RedisServer
from shared import names
from shared.messages import BODY, Finished, StepSample, encode
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
    assert "req-1.0/1 has not ended" in text
    assert "req-2.0/1 has" not in text, "it is another's"
    code, text = await run("nobody", "--redis", redis_server.url)
    assert code == 1
    assert "no request of that name waits" in text


async def test_the_course_of_a_request_is_told_against_its_limits(
    redis: Redis, redis_server: RedisServer
) -> None:
    seconds, _ = await redis.time()
    release = {
        "batch": "b1",
        "model": "m",
        "replica": "replica-0",
        "requests": "req-1.0/1",
        "released": f"{seconds}.0",
        "numbers": '{"limits:req-1.0/1":[0.5,1.0,0.2,null]}',
    }
    await redis.xadd(names.DECISIONS, release)
    times = {"started": seconds + 0.25, "first_token": seconds + 0.75}
    end = Finished("req-1.0", 1, 3, 5, "stop", **times)
    sample = StepSample(
        replica="replica-0", model="m", incarnation="i", seq=1, time=seconds + 1.25, seconds=0.1,
        b=1, finished=(end,),
    )  # fmt: skip
    await redis.xadd(names.METRICS, {"kind": "step", BODY: encode(sample)})
    code, text = await run("req-1", "--redis", redis_server.url)
    assert code == 0
    told = [line.strip() for line in text.splitlines() if line.strip().startswith("req-1.0/1")]
    assert told == [
        "req-1.0/1 came 0.5000 s before its release",
        "req-1.0/1 started 0.2500 s after its release",
        "req-1.0/1 first token 1.2500 s after it came (limit 1 s: missed by 0.2500 s)",
        "req-1.0/1 each further token 0.1250 s (limit 0.2 s: kept)",
        "req-1.0/1 ended 1.7500 s after it came: 5 tokens, stop",
    ]


async def test_a_request_that_waits_or_was_refused_is_told_so(
    redis: Redis, redis_server: RedisServer
) -> None:
    await redis.sadd(names.MODELS, "m")
    seconds, _ = await redis.time()
    fields = {"id": "req-1.0", "attempt": "1", "arrival": f"{seconds - 5}", "ttft_ms": "500"}
    await redis.xadd(names.requests("m"), {**fields, "body": b"\xff"})
    refusal = {"model": "m", "requests": "req-2.0/1", "refused": "the queue is full (503)"}
    await redis.xadd(names.DECISIONS, refusal)
    code, text = await run("req-1", "--redis", redis_server.url)
    assert code == 0
    assert "req-1.0/1 waits since" in text
    assert "in collm:requests:m, 0 before it; limits: ttft 500 ms" in text
    code, text = await run("req-2", "--redis", redis_server.url)
    assert code == 0
    assert "req-2.0/1 was refused: the queue is full (503)" in text
