"""What is asked of a base model, as the dispatcher sees it: hash ``demand:<model>``.

Written by the dispatcher about once a second, read by launcher and coordinator. It expires, so
that a reader never trusts an old one; without it they count finished requests themselves.
"""

from __future__ import annotations

import math

import msgspec
from redis.asyncio import Redis

from shared import names

TTL_MS = 10_000
RETRY_MAX = 600.0  # seconds; what a queue does later nobody can say


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second, tokens, seconds."""

    rate: float  # lambda-hat of arrivals
    prompt: float = 0.0  # mean prompt tokens
    output: float = 0.0  # expected output tokens
    slo: float | None = None  # tau of the strictest stream with load
    tpot: float | None = None
    limited_prompt: float = 0.0  # mean lengths of the requests under that tau; 0: as of all
    limited_output: float = 0.0
    wait_p95: float = 0.0  # q-hat: p95 of the wait of released requests
    released: float = 0.0  # requests that left the queue for replicas, of late

    @property
    def budget(self) -> float | None:
        """tau' = max(tau - q-hat, tau / 2)."""
        if self.slo is None:
            return None
        return max(self.slo - self.wait_p95, self.slo / 2)


def drain_seconds(waiting: int, rate: float, unknown: float) -> float:
    """Whole seconds, 1 to RETRY_MAX, in which a queue empties at ``rate`` requests a second.

    ``unknown`` while nothing leaves it.
    """
    if rate <= 0:
        return unknown
    return float(max(1, math.ceil(min(RETRY_MAX, waiting / rate))))


async def write(redis: Redis, model: str, demand: ModelDemand) -> None:
    """Replace the model's demand; it expires after TTL_MS."""
    key = names.demand(model)
    fields = {k: str(v) for k, v in msgspec.to_builtins(demand).items() if v is not None}
    async with redis.pipeline(transaction=True) as pipe:
        pipe.delete(key)
        pipe.hset(key, mapping=fields)
        pipe.pexpire(key, TTL_MS)
        await pipe.execute()


async def read(redis: Redis, model: str) -> ModelDemand | None:
    """None: the dispatcher has not said anything lately. Raises msgspec.ValidationError."""
    raw = await redis.hgetall(names.demand(model))
    values = {k.decode(): v.decode() for k, v in raw.items()}
    return msgspec.convert(values, ModelDemand, strict=False) if values else None
