"""A stream that goes while a consumer waits on it is a lost group, however Redis says so."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.redis_client import ensure_group, is_missing_group
from tests.dispatcher.peers import eventually


async def test_a_waiting_read_whose_stream_goes_is_a_lost_group(redis: Redis) -> None:
    await ensure_group(redis, "stream", "group")
    reading = asyncio.create_task(redis.xreadgroup("group", "me", {"stream": ">"}, block=60_000))

    async def waiting() -> bool:
        return bool((await redis.info("clients"))["blocked_clients"])

    await eventually(waiting, "the read waits")
    await redis.delete("stream")
    await redis.xadd("stream", {"a": 1})  # some versions speak at the deletion, some now
    with pytest.raises(ResponseError) as lost:
        await reading
    assert is_missing_group(lost.value), lost.value


async def test_a_read_after_the_stream_went_is_a_lost_group(redis: Redis) -> None:
    with pytest.raises(ResponseError) as lost:
        await redis.xreadgroup("group", "me", {"stream": ">"})
    assert is_missing_group(lost.value)


def test_the_words_of_older_versions_are_known() -> None:
    assert is_missing_group(ResponseError("UNBLOCKED the stream key no longer exists"))


def test_other_refusals_are_not_a_lost_group() -> None:
    assert not is_missing_group(ResponseError("WRONGTYPE a key of another kind"))
    assert not is_missing_group(ValueError("NOGROUP"))
