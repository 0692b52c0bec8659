"""The sizes that the operations page gives for entries in Redis are those of real entries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared import names
from shared.entries import request_values
from shared.messages import (
    BODY,
    Finished,
    Generate,
    Output,
    Sampling,
    StepReply,
    StepSample,
    encode,
)
from shared.replica_state import event
from shared.slo import Slo

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
MODEL = "SmolLM2-135M-Instruct"
NOW = 1795979441.123456


def told(stream: str) -> int:
    """Bytes an entry by the page."""
    row = re.search(rf"^\| `{re.escape(stream)}` \|[^|]*\| (\d+)", PAGE.read_text(), re.M)
    assert row, stream
    return int(row[1])


async def size(redis: Redis, key: str) -> float:
    entries = await redis.xlen(key)
    return float(await redis.memory_usage(key, samples=0)) / entries


async def test_a_request_of_a_thousand_tokens(redis: Redis) -> None:
    key = names.requests(MODEL)
    for i in range(300):
        request = Generate(
            id=f"{i:024x}.0", gateway="gateway-12345678", model=MODEL, adapter="support",
            prompt=tuple((i * 7 + k * 131) % 49000 for k in range(1000)), arrival=NOW,
            sampling=Sampling(max_tokens=200, stop_token_ids=(2,)), slo=Slo(ttft_ms=1000),
        )  # fmt: skip
        await redis.execute_command("XADD", key, "*", *request_values(request))
    assert await size(redis, key) == pytest.approx(told("requests:<model>"), rel=0.15)


async def test_a_step_of_sixteen_requests(redis: Redis) -> None:
    key = names.replies("g")
    for i in range(300):
        outputs = tuple(
            Output(id=f"{k:024x}.0", attempt=1, offset=i, tokens=(i * 100,)) for k in range(16)
        )
        await redis.xadd(key, {BODY: encode(StepReply(replica="replica-0", outputs=outputs))})
    assert await size(redis, key) == pytest.approx(told("replies:<gateway>"), rel=0.15)


async def test_a_sample(redis: Redis) -> None:
    for i in range(300):
        done = (Finished("a" * 24, 1, 100, 50, "stop", NOW, NOW),) if i % 4 == 0 else ()
        sample = StepSample(
            replica="replica-0", model=MODEL, incarnation="abcdef123456", seq=i, time=NOW + i,
            seconds=0.03, b=8, decode_tokens=8, kv_used=1000, kv_total=16384, finished=done,
        )  # fmt: skip
        fields = {"kind": "step", "replica": "replica-0", "model": MODEL, "time": f"{NOW:.6f}"}
        await redis.xadd(names.METRICS, {**fields, BODY: encode(sample)})
    assert await size(redis, names.METRICS) == pytest.approx(told("metrics"), rel=0.15)


async def test_an_event(redis: Redis) -> None:
    why = "idle: U=0.0123 U_switch=0.25 q=0 b=0 expected=0.4 capacity=3.2"
    for i in range(300):
        await event(redis, "join", session="support-1a2b", replica=f"replica-{i % 3}", why=why)
    assert await size(redis, names.EVENTS) == pytest.approx(told("events"), rel=0.3)
