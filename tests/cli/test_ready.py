"""When `collm up` calls a system ready, with and without keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from collm.up import ready
from tests.gateway.answerer import until


@asynccontextmanager
async def gateway(states: list[str], key: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that wants ``key``, and whose replica goes through ``states``."""
    app, asked = FastAPI(), []

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked.append(request.headers["authorization"])
        good = asked[-1] == f"Bearer {key}"
        return JSONResponse({}, HTTPStatus.OK if good else HTTPStatus.UNAUTHORIZED)

    @app.get("/health")
    async def health() -> Response:
        state = states.pop(0) if len(states) > 1 else states[0]
        return JSONResponse({"models": {"tiny": {"replicas": {"r0": state}}}})

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    task = asyncio.create_task(server._serve())
    await until(lambda: server.started, "the server's start")
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", asked
    server.should_exit = True
    await task


async def test_with_a_key_a_real_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLM_API_KEY", "good")
    async with gateway(["starting"], "good") as (url, asked):
        await ready.answers(url, ["tiny"], 20.0, print)
    assert asked == ["Bearer good"]


async def test_without_a_valid_key_a_replica_that_serves_counts() -> None:
    states = ["starting", "starting", "serving"]
    async with gateway(states, "good") as (url, asked):
        await ready.answers(url, ["tiny"], 20.0, print)
    assert len(asked) == 3


async def test_what_lasts_is_told_again_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "TELL_SECONDS", 0.2)
    told: list[str] = []
    async with gateway(["starting"], "good") as (url, _):
        with pytest.raises(ready.NotReady):
            await ready.answers(url, ["tiny"], 1.5, told.append)
    assert told[0].startswith("waiting for tiny: ")
    assert all(" s: the gateway says 401" in line for line in told[1:])
    assert len(told) > 1


async def test_a_replica_that_never_serves_is_said_so() -> None:
    async with gateway(["starting"], "good") as (url, _):
        with pytest.raises(ready.NotReady, match="401"):
            await ready.answers(url, ["tiny"], 0.3, print)
