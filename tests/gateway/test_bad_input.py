"""What cannot be answered is refused by name, in OpenAI's shape, and nothing is queued."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from shared import demand, names
from shared.demand import ModelDemand
from tests.gateway.conftest import MODEL, Served

HELLO = [{"role": "user", "content": "Hello"}]


def check_shape(response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    return error


CHAT = {"model": MODEL, "messages": HELLO}
BAD_CHATS = [
    ({**CHAT, "messages": []}, "messages"),
    ({**CHAT, "messages": "hi"}, "messages"),
    ({**CHAT, "messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({**CHAT, "messages": [{"role": "user"}]}, "messages"),
    ({**CHAT, "messages": [{"role": "user", "content": 7}]}, "messages"),
    ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": HELLO}, "model"),
    ({"model": MODEL}, "messages"),
    ({**CHAT, "model": 5}, "model"),
    ({**CHAT, "n": 0}, "n"),
    ({**CHAT, "n": 1000}, "n"),
    ({**CHAT, "n": 0, "stream": True}, "n"),
    ({**CHAT, "max_tokens": 0}, "max_tokens"),
    ({**CHAT, "max_tokens": -5}, "max_tokens"),
    ({**CHAT, "max_tokens": "many"}, "max_tokens"),
    ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({**CHAT, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({**CHAT, "temperature": -0.1}, "temperature"),
    ({**CHAT, "temperature": 2.1}, "temperature"),
    ({**CHAT, "top_p": 0}, "top_p"),
    ({**CHAT, "top_k": -2}, "top_k"),
    ({**CHAT, "seed": 1 << 70}, "seed"),
    ({**CHAT, "priority": 1 << 70}, "priority"),
    ({**CHAT, "priority": -(1 << 70)}, "priority"),
    ({**CHAT, "stop": ["a"] * 5}, "stop"),
    ({**CHAT, "stop": ""}, "stop"),
    ({**CHAT, "stop_token_ids": [100000]}, "stop_token_ids"),
    ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**CHAT, "slo": {"e2e_ms": -1}}, "slo.e2e_ms"),
    ({**CHAT, "slo": {"e2e": 1}}, "slo.e2e"),
    ({**CHAT, "no_such_parameter": 1}, "no_such_parameter"),
    ({**CHAT, "logit_bias": {"5": 1}}, "logit_bias"),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions"),
    ({**CHAT, "modalities": ["audio"]}, "modalities"),
    ({**CHAT, "best_of": 2}, "best_of"),
    ({**CHAT, "skip_special_tokens": False}, "skip_special_tokens"),
]


@pytest.fixture
async def quiet(served: Served):
    """Asserts afterwards that nothing reached the answerer."""
    yield served
    assert served.answerer.seen == []
    assert len(served.gateway.desk) == 0


async def test_bad_chat_parameters_are_refused_by_name(quiet: Served):
    for body, param in BAD_CHATS:
        response = await quiet.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, body
        error = check_shape(response)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, (body, error)


CASES_BAD_COMPLETION_PARAMETERS_AR = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5, 100000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"messages": HELLO}, "messages"),
]


async def test_bad_completion_parameters_are_refused_by_name(quiet: Served):
    for changes, param in CASES_BAD_COMPLETION_PARAMETERS_AR:
        body = {"model": MODEL, "prompt": "x", **changes}
        response = await quiet.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert check_shape(response)["param"] == param


async def test_parameters_that_change_nothing_are_accepted(served: Served):
    response = await served.chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        logit_bias={},
        best_of=1,
        logprobs=False,
        top_logprobs=None,
        modalities=["text"],
        response_format={"type": "text"},
        tools=None,
        repetition_penalty=1.0,
        stream_options=None,
        service_tier="auto",
    )
    assert response.status_code == 200, response.text


CASES_A_BODY_THAT_IS_NO_JSON_OBJEC = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b'"text"',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": NaN}]}',
    b'{"model": "tiny", "messages": ' + b"[" * 100_000,
    b'{"model": "tiny", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
]


async def test_a_body_that_is_no_json_object_is_refused(quiet: Served):
    for raw in CASES_A_BODY_THAT_IS_NO_JSON_OBJEC:
        response = await quiet.http.post("/v1/chat/completions", content=raw)
        assert response.status_code == 400
        check_shape(response)


async def test_an_unknown_model_is_404_and_never_answered_by_another(quiet: Served):
    for path, body in [
        ("/v1/chat/completions", {"model": "typo", "messages": HELLO}),
        ("/v1/completions", {"model": "typo", "prompt": "x"}),
        ("/v1/completions", {"model": "", "prompt": "x"}),
    ]:
        response = await quiet.http.post(path, json=body)
        assert response.status_code == 404
        error = check_shape(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert (await quiet.http.get("/v1/models/typo")).status_code == 404


async def test_prompt_plus_answer_over_the_context_is_refused(quiet: Served):
    response = await quiet.chat(max_tokens=500)
    assert response.status_code == 400
    assert check_shape(response)["code"] == "context_length_exceeded"
    response = await quiet.http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 512})
    assert check_shape(response)["code"] == "context_length_exceeded"


async def test_a_chat_without_max_tokens_gets_what_the_context_leaves(served: Served):
    await served.openai.chat.completions.create(model=MODEL, messages=HELLO)
    (request,) = served.answerer.seen
    assert request.sampling.max_tokens == 512 - len(request.prompt)


async def test_a_body_over_the_limit_is_413_also_when_its_length_is_not_declared(start):
    async with start(max_body_bytes=10_000) as served:
        declared = await served.http.post("/v1/completions", content=b"x" * 10_001)

        async def parts():
            for _ in range(30):
                yield b"x" * 1000

        chunked = await served.http.post("/v1/completions", content=parts())
        for response in (declared, chunked):
            assert response.status_code == 413
            check_shape(response)


async def test_a_prompt_of_100000_tokens_is_refused_and_nobody_else_waits(quiet: Served):
    huge = "tokens! " * 12_500
    request = asyncio.create_task(
        quiet.http.post("/v1/completions", json={"model": MODEL, "prompt": huge})
    )
    while not request.done():
        response = await quiet.http.get("/health/live", timeout=5)
        assert response.status_code == 200
    assert check_shape(request.result())["code"] == "context_length_exceeded"
    as_ids = await quiet.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": [70] * 100_000}
    )
    assert check_shape(as_ids)["code"] == "context_length_exceeded"


async def test_a_full_queue_is_503_with_retry_after_and_the_client_does_not_repeat(start, redis):
    async with start(queue_limit=3) as served:
        served.answerer.hold.clear()
        waiting = [asyncio.create_task(served.chat()) for _ in range(3)]
        from tests.gateway.answerer import until

        await until(lambda: redis.xlen(names.requests(MODEL)), "the queue to fill")

        async def full() -> bool:
            return await redis.xlen(names.requests(MODEL)) == 3

        await until(full, "a full queue")
        response = await served.chat()
        assert response.status_code == 503
        assert check_shape(response)["code"] == "server_is_overloaded"
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-should-retry"] == "false"
        patient = served.openai.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError):
            await patient.chat.completions.create(model=MODEL, messages=HELLO)
        served.answerer.hold.set()
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200] * 3


@pytest.mark.parametrize(
    ("released", "named"), [(0.2, "15"), (2.0, "2"), (50.0, "1"), (0.0, "7"), (None, "7")]
)
async def test_a_full_queue_names_the_time_in_which_it_empties(start, redis, released, named):
    """As the dispatcher tells how fast; what is configured while it does not know."""
    if released is not None:
        await demand.write(redis, MODEL, ModelDemand(rate=9.0, released=released))
    async with start(queue_limit=3, retry_after=7) as served:
        response = await served.chat(n=4)
        assert response.status_code == 503
        assert response.headers["retry-after"] == named


async def test_the_choices_of_one_request_are_queued_together_or_not_at_all(start, redis):
    async with start(queue_limit=3) as served:
        served.answerer.hold.clear()
        response = await served.chat(n=4)
        assert response.status_code == 503
        assert await redis.xlen(names.requests(MODEL)) == 0
        served.answerer.hold.set()


async def test_without_a_living_replica_requests_are_refused_or_wait_as_configured(start, redis):
    async with start() as served:
        await redis.delete(names.replica_alive(f"{MODEL}-r0"))
        await served.gateway.catalogue.refresh()
        response = await served.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"]
        health = await served.http.get("/health")
        assert health.status_code == 503
        assert (await served.http.get("/health/live")).status_code == 200
    async with start(when_no_replica="wait") as served:
        await redis.delete(names.replica_alive(f"{MODEL}-r0"))
        await served.gateway.catalogue.refresh()
        assert (await served.chat()).status_code == 200


async def test_routes_and_methods_that_do_not_exist_are_told_in_the_same_shape(quiet: Served):
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/health", 405),
    ]:
        response = await quiet.http.request(method, path)
        assert response.status_code == status, path
        check_shape(response)


async def test_the_clients_request_id_comes_back_and_two_equal_ones_do_not_clash(served: Served):
    headers = {"x-request-id": "my-id"}
    body = {"model": MODEL, "messages": HELLO}
    answers = await asyncio.gather(
        *[served.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
    )
    assert [a.headers["x-request-id"] for a in answers] == ["my-id"] * 2
    assert len({g.id for g in served.answerer.seen}) == 2
    odd = {"x-request-id": "a b\tc"}
    answer = await served.http.post("/v1/chat/completions", json=body, headers=odd)
    assert answer.headers["x-request-id"] != "a b\tc"


CASES_A_BAD_SLO_HEADER_IS_REFUSED = ["-1", "0", "abc", "nan", "inf", ""]


async def test_a_bad_slo_header_is_refused_by_name(quiet: Served):
    for value in CASES_A_BAD_SLO_HEADER_IS_REFUSED:
        response = await quiet.http.post(
            "/v1/chat/completions", json=CHAT, headers={"x-slo-ttft-ms": value}
        )
        assert response.status_code == 400
        assert check_shape(response)["param"] == "x-slo-ttft-ms"


async def test_models_show_base_adapters_and_emulation(start, redis, tiny_folder):
    from shared.adapters import AdapterRegistry, AdapterVersion
    from tests.gateway.answerer import register

    async with start() as served:
        await register(redis, "pretend", tiny_folder, engine="emulated")
        registry = AdapterRegistry(redis, served.gateway.settings.data_dir)
        await registry.register("law", base=MODEL, rank=8)
        await registry.publish("law", AdapterVersion(version="v1", path="/nowhere"))
        await served.gateway.catalogue.refresh()
        cards = {c["id"]: c for c in (await served.http.get("/v1/models")).json()["data"]}
        assert cards[MODEL]["max_model_len"] == 512
        assert cards[MODEL]["emulated"] is False
        assert cards["pretend"]["emulated"] is True
        assert (cards["law"]["parent"], cards["law"]["version"]) == (MODEL, "v1")
        answer = await served.chat(model="law")
        assert answer.json()["model"] == "law"
        assert served.answerer.seen[0].adapter == "law"
        assert served.answerer.seen[0].model == MODEL
        one = await served.openai.models.retrieve("law")
        assert one.id == "law"


async def test_a_damaged_reply_goes_to_dead_letters_and_the_gateway_lives_on(served: Served, redis):
    await redis.xadd(names.replies(served.gateway.id), {"body": b"\xc1broken"})
    assert (await served.chat()).status_code == 200
    ((_, letter),) = await redis.xrange(names.DEAD_LETTERS)
    assert letter[b"field:body"] == b"\xc1broken"
    assert letter[b"reason"]


def test_the_error_body_has_all_four_keys_of_openais_schema():
    from services.gateway.errors import ApiError

    content = json.loads(ApiError(400, "m").body())
    assert content == {
        "error": {"message": "m", "type": "invalid_request_error", "param": None, "code": None}
    }
