"""Following a stream without a group."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from shared.tail import follow

STREAM = "followed"


async def _take(redis: Redis, number: int, **options: float) -> list[bytes]:
    found = []
    entries = follow(redis, [STREAM], since="0", count=2, **options)
    async with asyncio.timeout(30):
        async for _, _, fields in entries:
            found.append(fields[b"n"])
            if len(found) == number:
                break
    await entries.aclose()  # type: ignore[attr-defined]
    return found


async def _fill(redis: Redis, number: int) -> list[bytes]:
    numbers = [str(n) for n in range(number)]
    for n in numbers:
        await redis.xadd(STREAM, {"n": n})
    return [n.encode() for n in numbers]


async def test_a_reader_that_lags_does_not_wait_for_more_to_gather(redis: Redis) -> None:
    sent = await _fill(redis, 6)
    assert await _take(redis, 6, gather=600.0) == sent


async def test_what_gathers_between_two_reads_comes_whole_and_in_order(redis: Redis) -> None:
    sent = await _fill(redis, 1)

    async def more() -> None:
        for n in range(1, 5):
            sent.append(str(n).encode())
            await redis.xadd(STREAM, {"n": n})

    reading = asyncio.create_task(_take(redis, 5, gather=0.01))
    await more()
    assert await reading == sent
