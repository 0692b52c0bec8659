"""Answers of both routes over real HTTP: contents, streams, usage, choices."""

from __future__ import annotations

import json

import pytest

from shared.messages import Failed
from tests.gateway.answerer import says, tokens_of
from tests.gateway.conftest import MODEL, Served

HELLO = [{"role": "user", "content": "Hello"}]


async def test_a_chat_is_answered_with_text_usage_and_finish_reason(served: Served):
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=50)
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 13
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.prompt_tokens == len(served.answerer.seen[0].prompt)
    tokenizer = served.gateway.catalogue.now.models[MODEL].tokenizer
    assert tokenizer.tokenizer.decode(served.answerer.seen[0].prompt, False) == prompt


async def test_a_stream_brings_role_text_finish_reason_and_done(served: Served):
    async with served.http.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HELLO, "stream": True},
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "Hello there!"
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert not any("usage" in c for c in chunks)


async def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(served: Served):
    stream = await served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 13
    assert all(c.usage is None and "usage" in c.model_fields_set for c in chunks[:-1])


async def test_top_k_beyond_every_message_format_means_the_whole_vocabulary(served: Served):
    """2^70 once ended the gateway: no encoder takes it."""
    reply = await served.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "top_k": 1 << 70}
    )
    assert reply.status_code == 200
    assert 0 < served.answerer.seen[0].sampling.top_k < 1 << 20


async def test_n_choices_are_n_requests_with_seeds_of_their_own(served: Served):
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [g.sampling.seed for g in served.answerer.seen] == [7, 8, 9]
    assert answer.usage.completion_tokens == 39


async def test_n_choices_stream_side_by_side(served: Served):
    stream = await served.openai.completions.create(model=MODEL, prompt="x", n=2, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "Hello there!", 1: "Hello there!"}


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("Hello", 1), (["a", "b"], 2), ([70, 71], 1), ([[70, 71], [72]], 2)],
)
async def test_completions_take_texts_and_token_ids(served: Served, prompt, choices):
    answer = await served.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=20)
    assert [c.text for c in answer.choices] == ["Hello there!"] * choices


async def test_a_completion_has_16_tokens_unless_told_otherwise(served: Served):
    served.answerer.script = says("x" * 100)
    answer = await served.openai.completions.create(model=MODEL, prompt="a")
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


async def test_text_parts_and_the_developer_role_are_understood(served: Served):
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
    ]
    await served.openai.chat.completions.create(model=MODEL, messages=messages)
    tokenizer = served.gateway.catalogue.now.models[MODEL].tokenizer
    text = tokenizer.tokenizer.decode(served.answerer.seen[0].prompt, False)
    assert text.startswith(
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nA\nB<|im_end|>"
    )


async def test_split_characters_are_never_shown_by_halves(served: Served):
    text = "a€😀é漢"
    served.answerer.script = says(text)
    stream = await served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    pieces = [c.choices[0].delta.content or "" async for c in stream]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_an_answer_that_ends_inside_a_character_streams_what_the_whole_one_says(
    served: Served,
):
    served.answerer.script = lambda _: tokens_of("ab€"[:3].encode()[:-1])
    whole = await served.openai.completions.create(model=MODEL, prompt="x", max_tokens=4)
    stream = await served.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=4, stream=True
    )
    assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_is_not_shown(served: Served, stream):
    served.answerer.script = says("one STOP two")
    text = await complete(served, stream, stop=["STOP", "xyz"])
    assert text == "one "


@pytest.mark.parametrize("stream", [False, True])
async def test_the_beginning_of_a_stop_string_is_shown_when_the_match_fails(served, stream):
    served.answerer.script = says("one STO two ST")
    assert await complete(served, stream, stop="STOP") == "one STO two ST"


async def test_a_stop_string_met_cancels_the_request(served: Served):
    served.answerer.script = says("one STOP " + "x" * 300)
    served.answerer.step_seconds = 0.005
    answer = await served.openai.completions.create(
        model=MODEL, prompt="a", max_tokens=300, stop="STOP"
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8
    from tests.gateway.answerer import until

    await until(lambda: served.answerer.cancelled, "the cancel")


async def complete(served: Served, stream: bool, **parameters) -> str:
    answer = await served.openai.completions.create(
        model=MODEL, prompt="a", max_tokens=100, stream=stream, **parameters
    )
    if not stream:
        return answer.choices[0].text
    return "".join([c.choices[0].text async for c in answer])


async def test_ignore_eos_takes_the_end_tokens_out(served: Served):
    await served.chat(ignore_eos=True)
    await served.chat(ignore_eos=True, stop_token_ids=[70])
    await served.chat()
    assert [g.sampling.stop_token_ids for g in served.answerer.seen] == [(), (70,), (2,)]


async def test_a_request_without_limits_has_no_deadline_and_headers_or_body_set_one(
    served: Served,
):
    await served.chat()
    await served.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HELLO, "slo": {"e2e_ms": 500}},
        headers={"x-slo-ttft-ms": "250", "x-slo-e2e-ms": "900"},
    )
    plain, limited = served.answerer.seen
    assert plain.deadline is None
    assert (limited.slo.ttft_ms, limited.slo.tpot_ms, limited.slo.e2e_ms) == (250, None, 500)
    assert limited.deadline == pytest.approx(limited.arrival + 0.5)


async def test_the_models_default_slo_holds_for_requests_that_name_none(start):
    models = {MODEL: {"slo": {"ttft_ms": 300}}}
    async with start(models=models) as served:
        await served.chat()
        assert served.answerer.seen[0].slo.ttft_ms == 300


async def test_an_answer_after_its_deadline_is_delivered(served: Served):
    served.answerer.step_seconds = 0.01
    response = await served.chat(slo={"e2e_ms": 1})
    assert response.status_code == 200
    text = (await served.http.get("/metrics")).text
    assert 'collm_slo_requests_total{engine="torch",met="false",model_name="tiny"} 1.0' in text


async def test_what_a_replica_refuses_is_told_to_the_client(served: Served):
    served.answerer.reply = lambda g: [
        Failed(
            id=g.id,
            attempt=g.attempt,
            status=503,
            code="server_is_overloaded",
            type="service_unavailable_error",
            message="shed",
            retry_after=3,
        )
    ]
    for stream in (False, True):
        response = await served.chat(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["code"] == "server_is_overloaded"


async def test_every_request_is_gone_from_the_books_and_the_reply_stream_is_trimmed(
    served: Served, redis
):
    from shared import names
    from tests.gateway.answerer import until

    for _ in range(20):
        await served.chat()
    assert len(served.gateway.desk) == 0

    async def trimmed() -> bool:
        await served.chat()
        return await redis.xlen(names.replies(served.gateway.id)) <= 14

    await until(trimmed, "trimming")
    assert await redis.xlen(names.requests(MODEL)) == 0


async def test_the_request_shapes_of_vllms_benchmark_are_answered(served: Served):
    """Bodies as ``vllm bench serve`` sends them to both routes, nulls included."""
    common = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
    }
    content = [{"type": "text", "text": "Hello"}]
    for path, body in (
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "logprobs": None}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 8},
        ),
    ):
        response = await served.http.post(path, json={**common, **body})
        assert response.status_code == 200, response.text
        frames = [line for line in response.text.split("\n\n") if line]
        assert frames[-1] == "data: [DONE]"
        usage = json.loads(frames[-2].removeprefix("data: "))
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 8


async def test_a_prompt_is_never_cut_by_what_the_tokenizers_file_says(start, tmp_path):
    from tests import tiny

    folder = tiny.write_config(tmp_path / "cut")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path.write_text(json.dumps(content))
    async with start(models={MODEL: {"path": str(folder)}}) as served:
        await served.openai.completions.create(model=MODEL, prompt="x" * 50)
        assert len(served.answerer.seen[0].prompt) == 50
