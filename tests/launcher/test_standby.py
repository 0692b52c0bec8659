"""Two launcher processes: one acts, and the other goes on when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared import names, sessions
from tests.launcher.test_service import OPTIONS, World


@contextlib.asynccontextmanager
async def launchers(url: str, data_dir: Path, count: int) -> AsyncIterator[None]:
    environment = {
        **os.environ,
        "COLLM_REDIS_URL": url,
        "COLLM_DATA_DIR": str(data_dir),
        "COLLM_LAUNCHER_PORT": "0",
        **{f"COLLM_LAUNCHER_{k.upper()}": json.dumps(v) for k, v in OPTIONS.items()},
    }
    command = [sys.executable, "-m", "services.launcher"]
    made = [await asyncio.create_subprocess_exec(*command, env=environment) for _ in range(count)]
    try:
        yield
    finally:
        for process in made:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def holder(redis: Redis, *, other_than: int = 0) -> int:
    """Process id of who holds the lease."""
    async with asyncio.timeout(180):
        while True:
            held = await redis.get(names.lease("launcher"))
            pid = int(held.decode().split(":")[1]) if held else 0
            if pid not in (0, other_than):
                return pid
            await asyncio.sleep(0.02)


async def test_a_killed_launcher_is_replaced_by_its_standby(
    redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    world = World(redis)
    beats = asyncio.create_task(world.beat())
    async with launchers(redis_server.url, tmp_path, 2):
        first = await holder(redis)
        os.kill(first, signal.SIGKILL)
        for i in range(3):
            await world.replica(f"r{i}", data={"chat": 100})
        await holder(redis, other_than=first)
        opened = await world.event("session_opened")
        session = await sessions.read(redis, opened["session"])
        assert session is not None
        assert session.clients == ("r0", "r1", "r2")
        assert len(await world.events("session_opened")) == 1
    beats.cancel()
    await asyncio.gather(beats, return_exceptions=True)
