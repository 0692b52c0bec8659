"""Waiting that says what it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from redis.asyncio import Redis

from collm.console import tell
from shared import names

TELL_SECONDS = 5.0

T = TypeVar("T")


async def telling(work: Awaitable[T], said: Callable[[], Awaitable[str]]) -> T:
    """The result of ``work``; until it is there, ``said`` goes to stderr every five seconds."""
    task, begun = asyncio.ensure_future(work), time.monotonic()
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=TELL_SECONDS)
            if done:
                return task.result()
            tell(f"waiting for {time.monotonic() - begun:.0f} s: {await said()}")
    finally:
        task.cancel()


async def states(redis: Redis, replicas: Iterable[str]) -> str:
    """Each replica's state and how many requests run there, in words."""
    found = []
    for replica in replicas:
        state, running = await redis.hmget(names.replica(replica), "state", "in_flight")
        word = state.decode() if state else "unknown"
        found.append(f"{replica} is {word}, {int(running or 0)} in flight")
    return "; ".join(found)
