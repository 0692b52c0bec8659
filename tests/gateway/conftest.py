"""A gateway over real HTTP and real Redis, with a scripted answerer behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from services.gateway.server import server
from services.gateway.service import Gateway
from services.gateway.settings import GatewaySettings
from tests.gateway.answerer import Answerer, answering, register, says, until

MODEL = "tiny"


class Served:
    """A running gateway and the usual clients."""

    def __init__(self, gateway: Gateway, url: str, answerer: Answerer, key: str) -> None:
        self.gateway, self.url, self.answerer = gateway, url, answerer
        headers = {"authorization": f"Bearer {key}"}
        # verify=False: reading the certificates takes longer than most tests, for plain http
        self.http = httpx.AsyncClient(base_url=url, timeout=30, headers=headers, verify=False)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        )

    async def chat(self, **changes: Any) -> httpx.Response:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 50,
        }
        return await self.http.post("/v1/chat/completions", json={**body, **changes})

    async def close(self) -> None:
        await self.http.aclose()
        await self.openai.close()


@asynccontextmanager
async def serve(settings: GatewaySettings) -> AsyncIterator[tuple[Gateway, str]]:
    """uvicorn in this process on a free port."""
    gateway = Gateway(settings)
    http = server(gateway)
    task = asyncio.create_task(http._serve())  # without its signal handlers
    await until(lambda: http.started or task.done(), "the gateway's start")
    if task.done():
        await task
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield gateway, f"http://127.0.0.1:{port}"
    finally:
        http.should_exit = True
        await task


Start = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def start(redis: Redis, redis_server: RedisServer, tiny_folder: Path, tmp_path: Path) -> Start:
    """``async with start(setting=…) as served``: model ``tiny`` says "Hello there!"."""

    @asynccontextmanager
    async def starter(key: str = "none", **settings: Any) -> AsyncIterator[Served]:
        await register(redis, MODEL, tiny_folder)
        values = {"redis_url": redis_server.url, "data_dir": tmp_path, "port": 0, **settings}
        values.setdefault("shutdown_grace", 1)
        async with (
            answering(redis, MODEL, says("Hello there!")) as answerer,
            serve(GatewaySettings(**values)) as (gateway, url),
        ):
            served = Served(gateway, url, answerer, key)
            try:
                yield served
            finally:
                await served.close()

    return starter


@pytest.fixture
async def served(start: Start) -> AsyncIterator[Served]:
    async with start() as running:
        yield running
