"""A service opens its connections to Redis at its start, not while a request waits."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from collm.redis_server import RedisServer
from shared.redis_client import STANDING, connect, stand_ready


async def opened_by(name: str, redis: Redis) -> int:
    return sum(client["name"] == name for client in await redis.client_list())


async def test_nothing_is_opened_after_the_start(redis: Redis, redis_server: RedisServer) -> None:
    name = f"standing-{uuid4().hex}"
    client = connect(redis_server.url)
    client.connection_pool.connection_kwargs["client_name"] = name
    try:
        await stand_ready(client)
        assert await opened_by(name, redis) == STANDING
        waiting = [client.blpop([f"{name}-{i}"], timeout=1) for i in range(STANDING)]
        await asyncio.gather(*waiting)
        await client.ping()
        assert await opened_by(name, redis) == STANDING
    finally:
        await client.aclose()


async def test_a_redis_that_is_away_is_told_and_holds_nothing_back() -> None:
    client = connect("redis://127.0.0.1:1/0")
    with pytest.raises(ConnectionError):
        await stand_ready(client)
    assert client.connection_pool.can_get_connection()
    await client.aclose()
