"""Replicas die, clients leave, Redis restarts: every request is answered once, or told why not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest

from collm.redis_server import RedisServer
from services.gateway.settings import GatewaySettings
from shared import names
from shared.messages import Lost, StepReply
from shared.records import ReplicaRecord
from shared.redis_client import connect
from tests.gateway.answerer import answering, register, says, tokens_of, until
from tests.gateway.conftest import MODEL, Served, serve

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"model": MODEL, "messages": HELLO, "max_tokens": 50}


def loses_first(served: Served, times: int, spoken: str = "Hel") -> None:
    """The first ``times`` attempts say ``spoken`` and are lost with their replica."""

    def reply(request):
        if request.attempt > times:
            return None
        answerer = served.answerer
        said = len(request.generated)
        text = tokens_of(spoken)[said:]
        output = answerer.output(request, said, text)
        return [
            *([output] if text else []),
            Lost(id=request.id, attempt=request.attempt, replica="r0"),
        ]

    served.answerer.reply = reply


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_request_continues_with_what_was_delivered(served: Served, stream):
    loses_first(served, 1)
    served.answerer.version = "v7"
    if stream:
        chunks = await served.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in chunks])
    else:
        text = (await served.chat()).json()["choices"][0]["message"]["content"]
    assert text == "Hello there!"
    first, second = served.answerer.seen
    assert (first.attempt, second.attempt) == (1, 2)
    assert list(second.generated) == tokens_of("Hel")
    assert second.adapter_version == "v7"
    assert (second.arrival, second.prompt) == (first.arrival, first.prompt)


async def test_a_request_lost_three_times_is_a_dead_letter_and_a_clear_error(served, redis):
    loses_first(served, 5)
    response = await served.chat()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "replica_lost"
    assert response.headers["x-should-retry"] == "false"
    assert len(served.answerer.seen) == 3

    async def letter() -> bool:
        return await redis.xlen(names.DEAD_LETTERS) == 1

    await until(letter, "the dead letter")


async def test_a_request_that_is_taken_back_often_is_not_given_up(served: Served):
    """A policy's preemptions are nobody's death: they are not counted as lost."""

    def reply(request):
        if request.attempt > 5:
            return None
        said = len(request.generated)
        output = served.answerer.output(request, said, tokens_of("Hello")[said : said + 1])
        back = Lost(id=request.id, attempt=request.attempt, replica="r0", preempted=True)
        return [output, back]

    served.answerer.reply = reply
    response = await served.chat()
    assert response.json()["choices"][0]["message"]["content"] == "Hello there!"
    assert [g.attempt for g in served.answerer.seen] == [1, 2, 3, 4, 5, 6]
    lost = [x for x in (await served.http.get("/metrics")).text.splitlines() if "_lost" in x]
    assert [x for x in lost if not x.startswith("#") and not x.endswith(" 0.0")] == []


async def test_a_stream_that_breaks_ends_with_an_error_frame_and_the_client_raises(served):
    loses_first(served, 5)
    stream = await served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="given up"):
        async for _ in stream:
            pass
    async with served.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert "error" in json.loads(lines[-1].removeprefix("data: "))
    assert "data: [DONE]" not in lines


async def test_repeated_and_late_outputs_change_nothing(served: Served):
    def reply(request):
        out = served.answerer.output
        hello, there = tokens_of("Hello"), tokens_of(" there")
        late = out(request, 5, tokens_of("XXX"))
        late = StepReply(
            replica="r0",
            outputs=tuple(
                type(o)(id=o.id, attempt=o.attempt - 1, offset=o.offset, tokens=o.tokens)
                for o in late.outputs
            ),
        )
        return [
            out(request, 0, hello),
            out(request, 0, hello),  # twice
            late,  # an earlier attempt
            out(request, 3, hello[3:] + there[:2]),  # overlapping
            out(request, 7, [*there[2:], 2], "stop"),
            out(request, 7, [*there[2:], 2], "stop"),
        ]

    served.answerer.reply = reply
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hello there"
    assert answer.usage.completion_tokens == 12


async def test_a_gap_in_the_outputs_makes_it_continue_elsewhere(served: Served):
    def reply(request):
        if request.attempt > 1:
            return None
        return [served.answerer.output(request, 3, tokens_of("lo"))]

    served.answerer.reply = reply
    response = await served.chat()
    assert response.json()["choices"][0]["message"]["content"] == "Hello there!"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_cancelled_while_its_answer_runs(served: Served, stream):
    served.answerer.script = says("x" * 400)
    served.answerer.step_seconds = 0.05
    async with httpx.AsyncClient(base_url=served.url) as client:
        request = asyncio.create_task(
            client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 400, "stream": stream})
        )
        await until(lambda: served.answerer.seen, "the request")
        request.cancel()
    await until(lambda: served.answerer.cancelled, "the cancel", seconds=2)
    assert len(served.gateway.desk) == 0


async def test_a_client_that_leaves_is_cancelled_while_its_request_is_queued(served: Served):
    served.answerer.hold.clear()
    async with httpx.AsyncClient(base_url=served.url) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: len(served.gateway.desk) == 1, "the request")
        request.cancel()
    await until(lambda: served.answerer.cancelled, "the cancel", seconds=2)
    assert len(served.gateway.desk) == 0
    served.answerer.hold.set()


async def test_the_hard_time_limit_is_a_504_and_cancels(start):
    async with start(request_timeout=0.5) as served:
        served.answerer.hold.clear()
        response = await served.chat()
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        await until(lambda: served.answerer.cancelled, "the cancel")
        served.answerer.hold.set()


async def test_a_model_that_is_being_loaded_is_not_called_unknown(served: Served, redis):
    record = ReplicaRecord(id="new-0", model="big", state="starting")
    await redis.sadd(names.REPLICAS, "new-0")
    await redis.hset(names.replica("new-0"), mapping=record.to_hash())
    await redis.set(names.replica_alive("new-0"), "1")
    asked = CHAT | {"model": "big"}
    response = await served.http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 503
    assert "'big' is being loaded" in response.json()["error"]["message"]
    assert float(response.headers["retry-after"]) > 0
    await redis.hset(names.replica("new-0"), "state", "draining")
    await served.gateway.catalogue.refresh()
    for name in ("big", "none"):
        unknown = await served.http.post("/v1/chat/completions", json=CHAT | {"model": name})
        assert unknown.status_code == 404


async def test_a_request_that_no_stream_holds_is_sent_again(start, redis):
    async with start(stale_after=0.2) as served:
        lost = []

        def reply(request):
            if request.attempt > 1:
                return None
            lost.append(request)
            return []  # taken out of the stream, never answered

        served.answerer.reply = reply
        asking = asyncio.create_task(served.chat())
        await until(lambda: lost, "the request")
        served.gateway.reconciler.request()
        response = await asking
        assert response.json()["choices"][0]["message"]["content"] == "Hello there!"
        assert [g.attempt for g in served.answerer.seen] == [1, 2]


async def test_a_request_that_waits_in_its_stream_is_not_sent_twice(served: Served, redis):
    served.answerer.hold.clear()
    asking = asyncio.create_task(served.chat())

    async def queued() -> bool:
        return await redis.xlen(names.requests(MODEL)) == 1

    await until(queued, "the request")
    await served.gateway.reconciler._reconcile(True)
    assert await redis.xlen(names.requests(MODEL)) == 1
    served.answerer.hold.set()
    assert (await asking).status_code == 200
    assert len(served.answerer.seen) == 1


async def test_a_request_that_has_not_gone_out_yet_is_not_sent_twice(served: Served, monkeypatch):
    """Redis answers slowly: nothing is in the stream yet when the gateway looks there."""
    outbox, may_go, asked = served.gateway.outbox, asyncio.Event(), asyncio.Event()
    flush = outbox._flush

    async def slowly() -> None:
        asked.set()
        await may_go.wait()
        await flush()

    monkeypatch.setattr(outbox, "_flush", slowly)
    asking = asyncio.create_task(served.chat())
    await asked.wait()
    ((id, attempt),) = outbox.unsent()
    assert attempt == 1
    await served.gateway.reconciler._reconcile(True)
    assert outbox.unsent() == {(id, 1)}
    may_go.set()
    assert (await asking).status_code == 200
    assert outbox.unsent() == frozenset()
    assert [g.attempt for g in served.answerer.seen] == [1]


@pytest.fixture
def own_redis(tmp_path: Path):
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("append_only", [True, False])
async def test_requests_survive_a_crash_of_redis(tmp_path, tiny_folder, append_only):
    """With its append-only file Redis brings the queue back; without, everything is gone and
    the gateway sends again what it owns."""
    server = RedisServer(tmp_path / "redis", append_only=append_only)
    server.start()
    client = connect(server.url)
    try:
        await register(client, MODEL, tiny_folder)
        settings = GatewaySettings(
            redis_url=server.url, data_dir=tmp_path, port=0, shutdown_grace=1
        )
        async with (
            answering(client, MODEL, says("Hello there!")) as answerer,
            serve(settings) as (gateway, url),
            httpx.AsyncClient(base_url=url, timeout=60) as http,
        ):
            answerer.hold.clear()
            before = [
                asyncio.create_task(http.post("/v1/chat/completions", json=CHAT)) for _ in range(5)
            ]

            async def queued() -> bool:
                return await client.xlen(names.requests(MODEL)) == 5

            await until(queued, "the queue")
            server.kill()
            during = [
                asyncio.create_task(http.post("/v1/chat/completions", json=CHAT)) for _ in range(5)
            ]
            await until(lambda: len(gateway.desk) == 10, "requests while Redis is away")
            await until(lambda: not gateway.inbox.connected, "the gateway to notice")
            assert (await http.get("/health")).status_code == 503
            server.start()
            await client.connection_pool.disconnect()  # the old server's
            await register(client, MODEL, tiny_folder)
            answerer.hold.set()
            responses = await asyncio.gather(*before, *during)
            texts = [r.json()["choices"][0]["message"]["content"] for r in responses]
            assert texts == ["Hello there!"] * 10
            await until(lambda: len(gateway.desk) == 0, "empty books")
    finally:
        await client.aclose()
        server.stop()


async def test_waiting_for_redis_is_bounded_by_the_setting(own_redis, tmp_path, tiny_folder):
    client = connect(own_redis.url)
    await register(client, MODEL, tiny_folder)
    await client.aclose()
    settings = GatewaySettings(
        redis_url=own_redis.url, data_dir=tmp_path, port=0, redis_wait=0.5, shutdown_grace=1
    )
    async with serve(settings) as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as http:
        own_redis.kill()
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "service_unavailable"
        assert response.headers["retry-after"]
        own_redis.start()


async def test_gateways_say_that_they_live_and_say_goodbye(start, redis):
    async with start() as served:
        gateway = served.gateway.id
        assert await redis.exists(names.gateway_alive(gateway))
        assert await redis.sismember(names.GATEWAYS, gateway)
        await served.chat()
    assert not await redis.exists(names.gateway_alive(gateway), names.replies(gateway))
    assert not await redis.sismember(names.GATEWAYS, gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_cut_when_the_gateway_stops_is_told(
    redis, redis_server, tmp_path, tiny_folder, stream
):
    """An answer that never ends: its client hears of the end of the grace, not of a broken line."""
    await register(redis, MODEL, tiny_folder)
    settings = GatewaySettings(
        redis_url=redis_server.url, data_dir=tmp_path, port=0, shutdown_grace=1
    )
    async with (
        answering(redis, MODEL, says("")) as answerer,
        httpx.AsyncClient(timeout=30) as http,
    ):
        answerer.reply = lambda request: [answerer.output(request, 0, tokens_of("Hel"))]
        async with serve(settings) as (gateway, url):
            asked = asyncio.create_task(
                http.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": stream})
            )
            await until(lambda: gateway.desk.counts().get((MODEL, "torch")) == [1, 0], "a token")
        response = await asked
    if stream:
        lines = [line for line in response.text.splitlines() if line]
        *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hel"
        error = last["error"]
    else:
        assert response.status_code == 503
        assert response.headers["retry-after"]
        error = response.json()["error"]
    assert error["code"] == "service_unavailable"
    assert "is being stopped" in error["message"]
