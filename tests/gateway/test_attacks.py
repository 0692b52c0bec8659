"""What an attacker would send is refused, and everybody else is served on."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from services.gateway.protocol import LimitedProtocol
from shared import api_keys
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


async def test_deep_json_is_refused_wherever_it_is_put(alive: Served):
    deep = "[" * 100_000 + "]" * 100_000
    nested = '{"a":' * 20_000 + "1" + "}" * 20_000
    head = f'{{"model":"{MODEL}","max_tokens":2,'
    for path, body in (
        ("/v1/chat/completions", deep),
        ("/v1/completions", f'{head}"prompt":{deep}}}'),
        ("/v1/chat/completions", f'{head}"messages":[{{"role":"user","content":{deep}}}]}}'),
        ("/v1/chat/completions", f'{head}"messages":[],"metadata":{nested}}}'),
        ("/tokenize", f'{{"model":"{MODEL}","messages":[{nested}]}}'),
        ("/v1/feedback", nested),
        ("/v1/fine_tuning/jobs", nested),
        ("/v1/load_lora_adapter", nested),
    ):
        response = await alive.http.post(path, content=body)
        assert response.status_code == 400, (path, response.text[:200])
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_headers_cannot_be_injected_nor_choose_the_tenant(alive: Served):
    head = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n"
    for line in (b"X-Request-Id: a\tb", b"X-Request-Id: " + b"a" * 500, b"X-Request-Id: <script>"):
        answer = await raw(alive, head + line + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert line.partition(b": ")[2] not in answer
    for name in ("x-tenant", "x-forwarded-for", "x-forwarded-user", "x-original-url", "host"):
        response = await alive.http.get("/v1/nothing", headers={name: "/v1/models"})
        assert response.status_code == 404
    # a method in a header stays a header
    response = await alive.http.post(
        "/v1/models/x", headers={"x-http-method-override": "DELETE"}, json={}
    )
    assert response.status_code == 405


async def test_an_adapter_that_claims_to_be_huge_is_refused_by_its_header(alive: Served, tmp_path):
    """A few bytes that promise terabytes are no reason to reserve them."""
    folder = tmp_path / "adapters" / "bomb"
    folder.mkdir(parents=True)
    config = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "peft_type": "LORA",
        "base_model_name_or_path": MODEL,
    }
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}})
    bombs = (
        (1 << 62).to_bytes(8, "little") + b"{}",
        len(header).to_bytes(8, "little") + header.encode(),
        b"",
    )
    load = {"lora_name": "bomb", "lora_path": "bomb"}
    for bomb in bombs:
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "adapter_model.safetensors").write_bytes(bomb)
        response = await alive.http.post("/v1/load_lora_adapter", json=load)
        assert response.status_code in (400, 404), response.text
    (folder / "adapter_config.json").write_text("[" * 100_000)
    response = await alive.http.post("/v1/load_lora_adapter", json=load)
    assert response.status_code in (400, 404)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 10**9}))
    response = await alive.http.post("/v1/load_lora_adapter", json=load)
    assert response.status_code in (400, 404)
    models = (await alive.http.get("/v1/models")).json()["data"]
    assert [m["id"] for m in models] == [MODEL]


def test_a_key_is_compared_with_every_entry_in_constant_time(monkeypatch):
    """So that the time of a refusal says nothing: each guess costs the same comparisons."""
    entries = tuple(
        api_keys.Key(
            id=f"key-{i}",
            hash=hashlib.sha256(f"sk-{i}".encode()).hexdigest(),
            tenant="acme",
            role="user",
            created=0.0,
        )
        for i in range(5)
    )
    compared: list[int] = []
    real = api_keys.hmac.compare_digest

    def counting(a: str, b: str) -> bool:
        compared.append(len(a) + len(b))
        return real(a, b)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", counting)
    for guess in (b"sk-0", b"sk-4", b"sk-", b"x" * 10_000, b""):
        compared.clear()
        found = api_keys.KeyFile(keys=entries).find(guess)
        assert (found is not None) == (guess in (b"sk-0", b"sk-4"))
        assert compared == [128] * 5


async def test_many_slow_clients_do_not_stop_anybody_else(alive: Served):
    """Half-sent requests hold a socket each and nothing more."""
    port = int(alive.url.rsplit(":", 1)[1])
    slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
    for _, writer in slow:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
    answers = await asyncio.gather(*[alive.chat() for _ in range(10)])
    assert {a.status_code for a in answers} == {200}
    for _, writer in slow:
        writer.close()
