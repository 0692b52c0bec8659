"""A small OpenAI-compatible server that misbehaves on request: real HTTP, real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """``mode`` of the next answers: ok, no_usage, refuse, broken, cut, error, slow, close."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = asyncio.Event()  # slow answers wait for it
        self._arrived = asyncio.Condition()

    async def asked(self, count: int) -> None:
        """Wait until ``count`` requests have come; a test's timeout bounds it."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.bodies) >= count)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake"}, {"id": "fake-lora"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        async with self._arrived:
            self._arrived.notify_all()
        if self.mode == "refuse":
            error = {"error": {"message": "queue full", "type": "x", "param": None, "code": None}}
            return JSONResponse(error, status_code=503, headers={"retry-after": "3"})
        if self.mode == "broken":
            return Response("no JSON at all", media_type="application/json")
        extra = {"x-request-id": f"r{len(self.bodies)}"}
        if self.mode == "close":
            extra["connection"] = "close"
        if not body.get("stream"):
            usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "length"}]}
            return JSONResponse({**answer, "usage": usage}, headers=extra)
        return StreamingResponse(
            self._events(body, self.mode), media_type="text/event-stream", headers=extra
        )

    async def _events(self, body: dict[str, Any], mode: str) -> AsyncIterator[bytes]:
        def event(value: object) -> bytes:
            return b"data: " + json.dumps(value).encode() + b"\n\n"

        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if mode == "slow":
            await self.release.wait()
        for k in range(body["max_tokens"]):
            text = {"delta": {"content": f"wörd{k} "}} if "messages" in body else {"text": "w "}
            whole = event({"choices": [{**text, "finish_reason": None}], "usage": None})
            yield whole[:9]  # events need not arrive in one piece
            yield whole[9:]
            if mode == "cut" and k == 1:
                return
            if mode == "error" and k == 1:
                yield event({"error": {"message": "the replica is gone", "code": 500}})
                return
        yield b": keep-alive\n\n"
        yield event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if mode != "no_usage" and body.get("stream_options", {}).get("include_usage"):
            counted = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}
            yield event({"choices": [], "usage": counted})
        yield b"data: [DONE]\n\n"


@asynccontextmanager
async def running() -> AsyncIterator[FakeServer]:
    """The server on a free port of the loopback interface."""
    fake = FakeServer()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(fake.app, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn offers a flag only
        await asyncio.sleep(0.005)
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield fake
    finally:
        fake.release.set()
        server.should_exit = True
        await task
        listener.close()
