"""What the gateway does in Redis is allowed to its user of deploy/redis/users.acl."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from services.gateway import feedback
from services.gateway.limits import Limits
from services.gateway.settings import LimitSettings
from shared import data_homes, names
from shared.jobs import Job, Jobs
from shared.redis_client import connect

ACL = Path(__file__).resolve().parents[2] / "deploy" / "redis" / "users.acl"


@pytest.fixture
async def own(redis: Redis, redis_server):
    """A connection as the gateway's user."""
    (line,) = [text for text in ACL.read_text().splitlines() if text.startswith("user gateway ")]
    rules = [word for word in line.split()[2:] if not word.startswith("#")]
    await redis.execute_command("ACL", "SETUSER", "gateway-test", "reset", *rules, ">secret")
    address = redis_server.url.split("://")[1].split("@")[-1]
    connection = connect(f"redis://gateway-test:secret@{address}")
    yield connection
    await connection.aclose()
    await redis.execute_command("ACL", "DELUSER", "gateway-test")


async def test_limits_feedback_and_jobs_need_no_more_than_it_has(redis: Redis, own: Redis):
    limits = Limits(
        own, LimitSettings(requests_per_minute=9, tokens_per_minute=99, concurrency=9), {}, 5.0
    )
    asking = asyncio.create_task(limits.admit("acme", 10))
    await asyncio.sleep(0)
    await limits.flush()
    entry, headers = await asking
    assert headers
    entry.close(used=1)
    await limits.flush()

    memory = feedback.Memory(own)
    chat = feedback.Asked(base="m", adapter="a", messages=[], answer="x")
    memory.keep("acme", {"id"}, chat)
    await memory.learnt("acme", "id", (await memory.find("acme", "id")) or chat, "r0")
    assert (await memory.find("acme", "id")).home == "r0"

    await data_homes.send(own, "r0", "a", "file", b"{}", heldout=True)
    jobs = Jobs(own)
    job = Job(id="ftjob-1", tenant="acme", model="m", adapter="a", training_file="f")
    await jobs.add(job)
    await jobs.enter(job.id, "info", "x", source="1-1", add={"trained_tokens": 5})
    assert (await jobs.get(Job, job.id)).trained_tokens == 5
    with pytest.raises(NoPermissionError):
        await own.get(names.lease("dispatcher"))
