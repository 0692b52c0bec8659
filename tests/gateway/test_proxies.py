"""What lies between client and gateway: proxies that cut silent streams, browsers, admin ports."""

from __future__ import annotations

import asyncio
import socket
import sys

import httpx
import pytest

from shared.settings import child_environment
from tests.gateway.answerer import register, says, until
from tests.gateway.conftest import MODEL

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 20, "stream": True}
PAGE = "https://chat.example"


async def test_a_silent_stream_carries_comments_until_the_answer_comes(start):
    async with start(sse_keep_alive=0.05) as served:
        served.answerer.hold.clear()
        async with served.http.stream("POST", "/v1/completions", json=BODY) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            seen = [line async for line in _first(lines, 4) if line]
            assert set(seen) == {": keep-alive"}
            served.answerer.hold.set()
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 2


async def _first(lines, count: int):
    for _ in range(count):
        yield await anext(lines)


async def test_the_stock_client_does_not_mind_comments(start):
    async with start(sse_keep_alive=0.01) as served:
        served.answerer.step_seconds = 0.03
        stream = await served.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == "Hello there!"


async def test_without_the_setting_no_comment_is_sent(start):
    async with start(sse_keep_alive=0) as served:
        served.answerer.script = says("ab")
        served.answerer.step_seconds = 0.2
        response = await served.http.post("/v1/completions", json=BODY)
        assert ": keep-alive" not in response.text


async def test_pages_of_other_origins_may_not_call_unless_configured(start):
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    async with start() as served:
        response = await served.chat()
        assert not [h for h in response.headers if h.startswith("access-control")]
        preflight = await served.http.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 405
        assert not [h for h in preflight.headers if h.startswith("access-control")]


async def test_configured_pages_may_call_and_others_may_not(start, tmp_path):
    from shared import api_keys

    keys = tmp_path / "keys.json"
    _, key = api_keys.create(keys, "acme")
    async with start(cors_origins=(PAGE,), api_keys_file=keys, key=key) as served:
        asked = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
            "authorization": "",
        }
        for path in ("/v1/chat/completions", "/v1/files"):
            preflight = await served.http.options(path, headers=asked)
            assert preflight.status_code == 204
            assert preflight.headers["access-control-allow-origin"] == PAGE
            assert "POST" in preflight.headers["access-control-allow-methods"]
            assert "authorization" in preflight.headers["access-control-allow-headers"]
        for path in ("/v1/models", "/v1/nothing"):
            answer = await served.http.get(path, headers={"origin": PAGE})
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "access-control-allow-credentials" not in answer.headers
        evil = await served.http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in evil.headers
        refused = {**asked, "origin": "https://evil.example"}
        assert (await served.http.options("/v1/files", headers=refused)).status_code == 401


@pytest.mark.timeout(180)
async def test_admin_routes_answer_on_their_own_port_only(
    redis, redis_server, tiny_folder, tmp_path
):
    await register(redis, MODEL, tiny_folder)
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, admin = one.getsockname()[1], two.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.gateway",
        env=child_environment(
            {
                "COLLM_REDIS_URL": redis_server.url,
                "COLLM_DATA_DIR": str(tmp_path),
                "COLLM_GATEWAY_PORT": str(port),
                "COLLM_GATEWAY_ADMIN_PORT": str(admin),
            }
        ),
    )
    try:
        async with httpx.AsyncClient(verify=False, timeout=30) as http:

            async def up() -> bool:
                try:
                    health = await http.get(f"http://127.0.0.1:{admin}/health/live")
                except httpx.TransportError:
                    return False
                return health.status_code == 200

            await until(up, "the gateway's start", 90.0)
            body = {"lora_name": "", "lora_path": ""}
            for at, path, status in (
                (port, "/v1/load_lora_adapter", 404),
                (port, "/v1/unload_lora_adapter", 404),
                (admin, "/v1/load_lora_adapter", 400),
                (admin, "/v1/completions", 404),
            ):
                answer = await http.post(f"http://127.0.0.1:{at}{path}", json=body)
                assert answer.status_code == status, (at, path, answer.text)
            assert (await http.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
            assert (await http.get(f"http://127.0.0.1:{admin}/v1/models")).status_code == 404
    finally:
        process.terminate()
        assert await process.wait() == 0
