"""The frame of the services of which one process acts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm.redis_server import RedisServer
from services.dispatcher.service import ROLE
from shared.leader import Acting, Leader
from tests.dispatcher.peers import eventually


async def test_it_is_ready_with_the_first_turn_and_starts_anew_after_what_passes(
    redis: Redis, redis_server: RedisServer
) -> None:
    runs = list[Acting]()
    turn, trouble = asyncio.Event(), asyncio.Event()

    async def act(acting: Acting) -> None:
        runs.append(acting)
        await turn.wait()
        acting.alive()
        await trouble.wait()
        trouble.clear()
        raise ResponseError("NOGROUP no such key or consumer group")

    leader = Leader(
        ROLE, redis_server.url, CollectorRegistry(), "127.0.0.1", 0, act, starting="recovering"
    )
    running = asyncio.create_task(leader.run())

    async def acts() -> bool:
        return len(runs) == 1

    async def ready() -> bool:
        return leader.ready() is None

    async def again() -> bool:
        return len(runs) == 2

    await eventually(acts, "it acts")
    assert leader.ready() == "recovering"
    turn.set()
    await eventually(ready, "ready after a turn")
    turn.clear()
    trouble.set()
    await eventually(again, "a new start")
    assert leader.ready() == "recovering"
    leader.stop()
    await running


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"COLLM_DISPATCHER_POLICY": "none_such"}, "none_such"),
        ({"COLLM_DISPATCHER_PORT": "-1"}, "port"),
    ],
)
def test_settings_that_cannot_be_end_the_start_with_their_fault(
    changed: dict[str, str], said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.dispatcher"],
        env={**os.environ, **changed},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
