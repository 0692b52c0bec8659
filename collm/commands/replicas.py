"""``collm drain``: take a replica out of service in good order."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer
from redis.asyncio import Redis

from collm.console import fail, out
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared import names
from shared.control import send_command
from shared.messages import Drain
from shared.redis_client import connect

LOOK_EVERY = 0.2  # seconds
GONE = ("stopped", "dead")


def register(app: typer.Typer) -> None:
    app.command()(drain)


def drain(
    replica: Annotated[str, typer.Argument(help="Id of the replica")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait; 0 = do not wait")] = 60.0,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Let a replica finish what it has taken, take nothing new, and stop."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        refused = asyncio.run(_drain(url, replica, timeout))
    if refused:
        fail(refused)
    out.print(f"{replica} has stopped" if timeout else f"{replica} drains")


async def _drain(url: str, replica: str, timeout: float) -> str | None:
    """Send the command and wait for the end; returns what went wrong, if anything."""
    async with connect(url) as redis:
        state = await _state(redis, replica)
        if not state:
            return f"no replica {replica!r} is known; collm queues lists them"
        if state in GONE:
            return f"{replica} is {state} already"
        await send_command(redis, names.control(replica), Drain(reason="collm drain"))
        end = time.monotonic() + timeout
        while timeout and (state := await _state(redis, replica)) not in GONE:
            if time.monotonic() > end:
                return f"{replica} is still {state} after {timeout:.0f} s and goes on draining"
            await asyncio.sleep(LOOK_EVERY)
        return f"{replica} died while it drained" if state == "dead" else None


async def _state(redis: Redis, replica: str) -> str:
    found = await redis.hget(names.replica(replica), "state")
    return found.decode() if found else ""
