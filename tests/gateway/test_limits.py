"""A tenant's limits: requests and tokens a minute, requests at once, over all gateways together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.gateway.errors import ApiError
from services.gateway.limits import Limits
from services.gateway.settings import LimitSettings, TenantSettings
from shared import api_keys, names
from shared.redis_client import connect
from shared.settings import child_environment
from tests.gateway.answerer import answering, register, says, until
from tests.gateway.conftest import MODEL
from tests.gateway.test_access import bearer

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


@pytest.fixture
def keys_file(tmp_path):
    return tmp_path / "keys.json"


async def test_requests_a_minute_are_limited_by_tenant_with_openais_headers(start, keys_file):
    _, acme = api_keys.create(keys_file, "acme")
    _, other = api_keys.create(keys_file, "other")
    tenants = {"acme": {"limits": {"requests_per_minute": 2}}}
    async with start(api_keys_file=keys_file, tenants=tenants, key=acme) as served:
        first, second, third = [await served.chat() for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-reset-requests" in first.headers
        assert int(third.headers["retry-after"]) >= 1
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        served.http.headers.update(bearer(other))
        assert (await served.chat()).status_code == 200


async def test_tokens_a_minute_count_what_was_used_not_what_was_reserved(start):
    async with start(limits={"tokens_per_minute": 300}) as served:
        for _ in range(3):
            response = await served.chat(max_tokens=200)
            assert response.status_code == 200
        used = response.json()["usage"]["total_tokens"]
        assert used < 100
        response = await served.chat(max_tokens=280)
        assert response.status_code == 429
        assert response.headers["x-should-retry"] == "false"  # more than a whole minute's


async def test_a_tenants_concurrency_is_limited(start):
    async with start(limits={"concurrency": 2}) as served:
        served.answerer.hold.clear()
        running = [asyncio.create_task(served.chat()) for _ in range(2)]
        await until(lambda: len(served.gateway.desk) == 2, "two requests")
        assert (await served.chat()).status_code == 429
        served.answerer.hold.set()
        assert [r.status_code for r in await asyncio.gather(*running)] == [200, 200]
        assert (await served.chat()).status_code == 200


def limited(redis, **limits: int) -> Limits:
    return Limits(redis, LimitSettings(**limits), {}, redis_wait=5.0)


@asynccontextmanager
async def running(*books: Limits) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(b.run()) for b in books]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def admitted(books: Limits, count: int, tokens: int = 10) -> list[object]:
    """What each of ``count`` requests at once is told: a pass, or the error."""
    found = await asyncio.gather(
        *(books.admit("acme", tokens) for _ in range(count)), return_exceptions=True
    )
    return [f if isinstance(f, BaseException) else f[0] for f in found]


def refused(told: list[object]) -> int:
    assert all(not isinstance(t, BaseException) or isinstance(t, ApiError) for t in told), told
    return sum(isinstance(t, ApiError) and t.status == 429 for t in told)


async def test_two_processes_share_requests_and_tokens_a_minute(redis):
    one, two = limited(redis, requests_per_minute=4), limited(redis, requests_per_minute=4)
    async with running(one, two):
        begun = time.monotonic()
        told = await admitted(one, 3) + await admitted(two, 3) + await admitted(one, 3)
        refilled = int((time.monotonic() - begun) * 4 / 60)
        assert 5 - refilled <= refused(told) <= 5
        assert await redis.ttl(names.tenant_levels("acme")) in range(1, 62)


async def test_what_is_not_used_is_given_back_to_all_processes(redis):
    one, two = limited(redis, tokens_per_minute=100), limited(redis, tokens_per_minute=100)
    async with running(one, two):
        (held,) = await admitted(one, 1, 90)
        assert refused(await admitted(two, 1, 90)) == 1
        held.close(used=5)

        async def fits() -> bool:
            return refused(await admitted(two, 1, 90)) == 0

        await until(fits, "the tokens to come back")
        assert refused(await admitted(one, 1, 90)) == 1


async def test_two_processes_share_the_concurrency_also_when_all_ask_at_once(redis):
    one, two = limited(redis, concurrency=3), limited(redis, concurrency=3)
    async with running(one, two):
        told = [*await admitted(one, 2), *await admitted(two, 5)]
        assert refused(told) == 4
        passes = [t for t in told if not isinstance(t, ApiError)]
        for held in passes:
            held.close(used=1)

        async def free() -> bool:
            return not await redis.exists(names.tenant_running("acme"))

        await until(free, "the passes to be given back")
        assert refused(await admitted(two, 3)) == 0


async def test_a_request_that_goes_away_while_it_asks_keeps_nothing(redis):
    books = limited(redis, concurrency=1, tokens_per_minute=100)
    asking = asyncio.create_task(books.admit("acme", 90))
    await asyncio.sleep(0)  # it asks; nobody answers yet
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with running(books):
        (held,) = await admitted(books, 1, 90)
        assert not isinstance(held, BaseException)

    late = limited(redis, concurrency=1, tokens_per_minute=100)
    await redis.flushdb()
    asking = asyncio.create_task(late.admit("acme", 90))
    await asyncio.sleep(0)
    await late.flush()  # let in, but it has not been told when it is cancelled
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with running(late):

        async def free() -> bool:
            return refused(await admitted(late, 1, 90)) == 0

        await until(free, "what it held to come back")


async def test_levels_refill_evenly_and_hold_no_more_than_a_minute(redis):
    key = names.tenant_levels("acme")
    books = limited(redis, requests_per_minute=60)
    async with running(books):
        await admitted(books, 1)
        seconds, _ = await redis.time()
        for ago, left in ((10, 9), (1000, 59)):  # 10 or 60 have come back, one is taken
            await redis.hset(key, mapping={"requests": 0, "requests_at": seconds - ago})
            await admitted(books, 1)
            found = float(await redis.hget(key, "requests"))
            assert left <= found < left + 2
        _, headers = await books.admit("acme", 1)
        assert int(dict(headers)[b"x-ratelimit-remaining-requests"]) in (58, 59)


async def test_a_redis_that_is_away_ends_the_waiting_with_503():
    redis = connect("redis://127.0.0.1:1")
    books = Limits(redis, LimitSettings(concurrency=1), {}, redis_wait=0.1)
    async with running(books):
        (told,) = await admitted(books, 1)
        assert isinstance(told, ApiError)
        assert told.status == 503
    await redis.aclose()


async def test_tenants_and_gateways_without_limits_ask_nothing(start, redis, keys_file):
    _, other = api_keys.create(keys_file, "other")
    tenants = {"acme": {"limits": {"concurrency": 5}}, "other": {}}
    async with start(api_keys_file=keys_file, tenants=tenants, key=other) as served:
        assert (await served.chat()).status_code == 200
        assert [k async for k in redis.scan_iter("collm:tenant:*")] == []
    plain = Limits(redis, LimitSettings(), {"acme": TenantSettings()}, 5.0)
    assert plain.none
    await plain.run()  # has nothing to do and ends


# ---------------------------------------------------------------- whole processes


@asynccontextmanager
async def gateway(folder: Path, redis_url: str, name: str, **variables: str) -> AsyncIterator:
    """A gateway in a process of its own: (url, process)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "COLLM_REDIS_URL": redis_url,
        "COLLM_DATA_DIR": str(folder),
        "COLLM_GATEWAY_PORT": str(port),
        "COLLM_GATEWAY_NAME": name,
        **variables,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=child_environment(own)
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:

            async def up() -> bool:
                try:
                    return (await http.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(up, "the gateway's start", 90.0)
            yield http, process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


@pytest.mark.timeout(240)
async def test_two_gateway_processes_hold_one_limit_together_and_a_dead_one_holds_nothing(
    redis, redis_server, tiny_folder, tmp_path
):
    await register(redis, MODEL, tiny_folder)
    config = tmp_path / "collm.yaml"
    config.write_text("gateway: {limits: {concurrency: 2, requests_per_minute: 1000}}\n")
    both = {"COLLM_CONFIG": str(config)}
    async with (
        answering(redis, MODEL, says("Hello there!")) as answerer,
        gateway(tmp_path, redis_server.url, "one", **both) as (one, _),
        gateway(tmp_path, redis_server.url, "two", **both) as (two, other),
    ):
        answerer.hold.clear()

        async def ask(http: httpx.AsyncClient) -> int:
            return (await http.post("/v1/chat/completions", json=BODY)).status_code

        held = [asyncio.create_task(ask(http)) for http in (one, two)]

        async def both_run() -> bool:
            return await redis.hlen(names.tenant_running("")) == 2

        await until(both_run, "a request on each gateway")
        refusal = await one.post("/v1/chat/completions", json=BODY)
        assert refusal.status_code == 429
        assert int(refusal.headers["x-ratelimit-remaining-requests"]) == 998
        assert await ask(two) == 429
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await held[1]
        answerer.hold.set()
        assert await held[0] == 200
        answerer.hold.clear()
        waiting = []

        async def two_more() -> bool:
            """Both places are the living gateway's as soon as the dead one's report is stale."""
            waiting.append(asyncio.create_task(ask(one)))
            await asyncio.sleep(0.3)
            return sum(not task.done() for task in waiting) == 2

        await until(two_more, "the dead gateway's place", 30.0)
        answerer.hold.set()
        assert set(await asyncio.gather(*waiting)) == {200, 429}
