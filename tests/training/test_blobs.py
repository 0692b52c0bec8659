"""Blobs in Redis: chunked, whole or not there, bounded."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared import blobs, names
from shared.redis_client import connect_sync


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5000])
async def test_what_was_put_comes_back_in_chunks(
    redis: Redis, redis_server: RedisServer, size: int
) -> None:
    data = bytes(i % 251 for i in range(size))
    await blobs.put(redis, "a", data, chunk_bytes=1000)
    assert await blobs.get(redis, "a") == data
    assert await redis.hlen(names.blob("a")) == -(-size // 1000) + 1
    with connect_sync(redis_server.url) as client:
        assert blobs.get_sync(client, "a") == data
        blobs.put_sync(client, "b", data, chunk_bytes=300)
    assert await blobs.get(redis, "b") == data


async def test_a_blob_expires_and_an_incomplete_one_is_not_there(redis: Redis) -> None:
    await blobs.put(redis, "a", b"x" * 10, ttl=100)
    assert 99_000 < await redis.pttl(names.blob("a")) <= 100_000
    await redis.hdel(names.blob("a"), "head")
    with pytest.raises(blobs.BlobError, match="not there"):
        await blobs.get(redis, "a")


async def test_damage_and_size_are_found(redis: Redis) -> None:
    with pytest.raises(blobs.BlobError, match="exceed the limit of 5"):
        await blobs.put(redis, "a", b"x" * 6, limit=5)
    await blobs.put(redis, "a", b"x" * 3000, chunk_bytes=1000)
    with pytest.raises(blobs.BlobError, match="exceed the limit"):
        await blobs.get(redis, "a", limit=2999)
    await redis.hset(names.blob("a"), "1", b"y" * 1000)
    with pytest.raises(blobs.BlobError, match="damaged"):
        await blobs.get(redis, "a")
    await redis.hdel(names.blob("a"), "1")
    with pytest.raises(blobs.BlobError, match="chunk is missing"):
        await blobs.get(redis, "a")


async def test_a_shorter_blob_under_the_same_id_leaves_nothing_of_the_longer(redis: Redis) -> None:
    await blobs.put(redis, "a", b"x" * 3000, chunk_bytes=1000)
    await blobs.put(redis, "a", b"y" * 500, chunk_bytes=1000)
    assert await blobs.get(redis, "a") == b"y" * 500
    assert await redis.hlen(names.blob("a")) == 2
    await blobs.delete(redis, "a", "unknown")
    assert not await redis.exists(names.blob("a"))


async def test_readers_and_writers_of_different_blobs_do_not_meet(redis: Redis) -> None:
    await asyncio.gather(*(blobs.put(redis, f"b{i}", bytes([i]) * 5000) for i in range(20)))
    found = await asyncio.gather(*(blobs.get(redis, f"b{i}") for i in range(20)))
    assert found == [bytes([i]) * 5000 for i in range(20)]
