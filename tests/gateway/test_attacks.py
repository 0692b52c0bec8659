"""What an attacker would send is refused, and everybody else is served on."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.gateway.protocol import LimitedProtocol
from tests.gateway.answerer import says, until
from tests.gateway.conftest import MODEL, Served

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


async def raw(served: Served, data: bytes, wait: float = 10.0) -> bytes:
    """Send bytes, return everything until the server closes or ``wait`` seconds pass."""
    port = int(served.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(wait):
            return await reader.read()
    finally:
        writer.close()


def error_of(answer: bytes, status: int) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture
async def alive(served: Served):
    """Everybody else is served afterwards."""
    yield served
    assert (await served.chat()).status_code == 200


CASES_HEADERS_OVER_THE_LIMIT_ARE_4 = [
    b"GET /health HTTP/1.1\r\n" + b"X-Many: 12345678\r\n" * 5000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX-Endless: " + b"a" * 100_000,
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
]


async def test_headers_over_the_limit_are_431(alive: Served):
    for head in CASES_HEADERS_OVER_THE_LIMIT_ARE_4:
        error_of(await raw(alive, head), 431)


CASES_WHAT_IS_NO_HTTP_IS_400_IN_TH = [
    b"nonsense\r\n\r\n",
    b"GET /%ff HTTP/1.1\r\nContent-Length: abc\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


async def test_what_is_no_http_is_400_in_the_usual_shape(alive: Served):
    for data in CASES_WHAT_IS_NO_HTTP_IS_400_IN_TH:
        error_of(await raw(alive, data), 400)


async def test_a_client_that_never_ends_its_headers_is_cut_off(alive: Served, monkeypatch):
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 0.3)
    error_of(await raw(alive, b"GET /health HTTP/1.1\r\nX-Slow: "), 408)
    error_of(await raw(alive, b""), 408)


async def test_a_client_that_never_ends_its_body_is_cut_off(start):
    async with start(body_timeout=0.3) as served:
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n"
        error_of(await raw(served, head), 408)
        error_of(await raw(served, head + b'{"model":'), 408)
        assert (await served.chat()).status_code == 200


async def test_a_client_that_does_not_read_is_cut_off_at_the_time_limit(start, monkeypatch):
    monkeypatch.setattr("services.gateway.desk.STUCK_SECONDS", 0.3)
    async with start(request_timeout=1.0) as served:
        served.answerer.script = says("x" * 400)
        served.answerer.per_step = 400
        body = json.dumps(
            {"model": MODEL, "prompt": ["x" * 400] * 100, "max_tokens": 100, "stream": True,
             "echo": True, "n": 1}
        ).encode()  # fmt: skip
        port = int(served.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await until(lambda: served.answerer.seen, "the request")
        await until(lambda: len(served.gateway.desk) == 0, "the end")
        writer.close()
        reader.feed_eof()


async def test_prompts_cannot_reach_the_templates_sandbox(alive: Served):
    """A prompt is data: template syntax in it is not run."""
    text = "{{ 7 * 7 }}{% for x in [1] %}{{ messages }}{% endfor %}"
    await alive.chat(messages=[{"role": "user", "content": text}])
    vocabulary = alive.gateway.catalogue.now.models[MODEL].vocabulary
    assert text in vocabulary.decode(alive.answerer.seen[0].prompt)


async def test_template_variables_of_our_own_cannot_be_replaced(alive: Served):
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        response = await alive.chat(chat_template_kwargs={name: "x"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs"


CASES_PATHS_LEAD_NOWHERE = [
    "/v1/files/..%2f..%2fetc%2fpasswd",
    "/v1/files/file-..%2f..%2fx",
    "/v1/files/file-x/content/../../..",
    "/v1/fine_tuning/jobs/ftjob-:x/events",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/models/%00",
    "/%2e%2e/%2e%2e/etc/passwd",
]


async def test_paths_lead_nowhere(alive: Served):
    for path in CASES_PATHS_LEAD_NOWHERE:
        answer = await raw(alive, f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
        error_of(answer, 404)


async def test_many_unknown_models_do_not_make_redis_busy(alive: Served, redis):
    """Each unknown name asks Redis at most a few times a second, whoever asks."""

    async def asked() -> int:
        return int((await redis.info("commandstats"))["cmdstat_smembers"]["calls"])

    before = await asked()
    answers = await asyncio.gather(*[alive.chat(model=f"none-{i}") for i in range(60)])
    assert {a.status_code for a in answers} == {404}
    assert await asked() - before < 60


async def test_no_answer_tells_what_software_answers(alive: Served):
    response = await alive.http.get("/health")
    assert "server" not in response.headers
    assert "date" not in response.headers
