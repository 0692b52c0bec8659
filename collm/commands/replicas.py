"""``collm drain`` and ``undrain``: take a replica out of service in good order, and back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import typer
from redis.asyncio import Redis

from collm.console import fail, out
from collm.waiting import states, telling
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared import names
from shared.control import send_command
from shared.messages import Drain
from shared.redis_client import connect
from shared.replica_state import ANSWERING, State

LOOK_EVERY = 0.2  # seconds
GONE = frozenset({State.STOPPED, State.DEAD})
STARTED = ANSWERING | {State.STARTING}
TAKE_SECONDS = 30  # within which a `collm up` sees that a replica is wanted again

NameArgument = Annotated[str, typer.Argument(help="Id of the replica")]


def register(app: typer.Typer) -> None:
    app.command()(drain)
    app.command()(undrain)


def drain(
    replica: NameArgument,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; 0 = do not wait")] = 60.0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Then start it anew, as `collm undrain` does")
    ] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Let a replica finish what it has taken, take nothing new, and stop."""
    if restart and not timeout:
        fail("--restart waits for the end of the drain: give a --timeout above 0")
    url = redis_url(redis, data_dir)
    with redis_errors():
        refused = asyncio.run(_drain(url, replica, timeout))
    if refused:
        fail(refused)
    out.print(f"{replica} has stopped" if timeout else f"{replica} drains")
    if restart:
        undrain(replica, redis=redis, data_dir=data_dir)


def undrain(
    replica: NameArgument,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; 0 = do not wait")] = 600.0,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Have the `collm up` that runs a replica start it again after it was drained or given up."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        refused = asyncio.run(_undrain(url, replica, timeout))
    if refused:
        fail(refused)
    out.print(f"{replica} serves again" if timeout else f"{replica} is wanted again")


async def _drain(url: str, replica: str, timeout: float) -> str | None:
    """Send the command and wait for the end; returns what went wrong, if anything."""
    async with connect(url) as redis:
        state = await _state(redis, replica)
        if not state:
            return f"no replica {replica!r} is known; collm queues lists them"
        if state in GONE:
            return f"{replica} is {state} already"
        await send_command(redis, names.control(replica), Drain(reason="collm drain"))
        if not timeout:
            return None
        state = await _reached(redis, replica, GONE, timeout)
        if state not in GONE:
            return f"{replica} is still {state} after {timeout:.0f} s and goes on draining"
        return f"{replica} died while it drained" if state == "dead" else None


async def _undrain(url: str, replica: str, timeout: float) -> str | None:
    """Leave the wish and wait until the replica serves; returns what went wrong, if anything."""
    async with connect(url) as redis:
        state = await _state(redis, replica)
        if not state:
            return f"no replica {replica!r} is known; collm queues lists them"
        if state not in GONE:
            return f"{replica} is {state}; only one that is stopped or dead is started again"
        wish = names.replica_wanted(replica)
        await redis.set(wish, "1", ex=2 * TAKE_SECONDS)
        if not timeout:
            return None
        state = await _reached(redis, replica, STARTED, min(timeout, TAKE_SECONDS))
        if state not in STARTED and await redis.delete(wish):
            return (
                f"{replica} is {state} and no `collm up` that runs it answers; start it the way "
                "it was started before"
            )
        state = await _reached(redis, replica, ANSWERING, timeout)
        return None if state in ANSWERING else f"{replica} is {state} after {timeout:.0f} s"


async def _reached(redis: Redis, replica: str, wanted: frozenset[State], timeout: float) -> str:
    """The replica's state when it is one of those ``wanted``, or after ``timeout`` seconds."""

    async def reach() -> None:
        while True:
            if await _state(redis, replica) in wanted:
                return
            await asyncio.sleep(LOOK_EVERY)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await telling(reach(), lambda: states(redis, [replica]))
    return await _state(redis, replica)


async def _state(redis: Redis, replica: str) -> str:
    found = await redis.hget(names.replica(replica), "state")
    return found.decode() if found else ""
