"""What a replica writes to Redis stays bounded."""

from __future__ import annotations

import asyncio
import contextlib

from redis.asyncio import Redis

from services.replica.link import Publisher, Turn
from shared import names
from shared.messages import StepSample

KEPT, NODE = 200, 100  # Redis trims whole nodes of a stream, of 100 entries


async def test_the_metrics_log_keeps_as_much_as_it_is_told(redis: Redis) -> None:
    publisher = Publisher(redis, "r0", "m", KEPT)
    sample = StepSample(replica="r0", model="m", incarnation="i", seq=1, time=1.0, seconds=0.1, b=1)
    sending = asyncio.create_task(publisher.run())
    for _ in range(10):
        publisher.put(Turn(samples=[("step", sample)] * KEPT))
    await publisher.drained()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    assert KEPT <= await redis.xlen(names.METRICS) < KEPT + NODE
