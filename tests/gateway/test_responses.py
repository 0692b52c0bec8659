"""POST /v1/responses with the stock client: whole, as events, and what is refused."""

from __future__ import annotations

import json

import openai
import pytest

from shared.messages import Failed
from tests.gateway.answerer import register
from tests.gateway.conftest import MODEL, Served


async def test_a_response_is_whole_and_typed(served: Served):
    response = await served.openai.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=50, temperature=0.5
    )
    assert response.output_text == "Hello there!"
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert response.usage is not None
    assert response.usage.output_tokens == 13
    assert response.usage.total_tokens == response.usage.input_tokens + 13
    assert response.id.startswith("resp_")
    asked = served.answerer.seen[0]
    assert asked.sampling.temperature == 0.5
    assert asked.sampling.max_tokens == 50
    chat = await served.chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ]
    )
    assert chat.status_code == 200
    assert served.answerer.seen[1].prompt == asked.prompt  # the same question in other words


async def test_messages_and_parts_are_taken(served: Served):
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hi", "annotations": []}],
        },
        {"role": "user", "content": "Again"},
    ]
    response = await served.openai.responses.create(model=MODEL, input=turns)
    assert response.output_text == "Hello there!"
    await served.chat(
        messages=[
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Again"},
        ]
    )
    assert served.answerer.seen[0].prompt == served.answerer.seen[1].prompt


async def test_a_stream_has_openais_events_in_their_order(served: Served):
    stream = await served.openai.responses.create(model=MODEL, input="Hello", stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        "Hello there!"
    )
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Hello there!"
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 13
    async with served.openai.responses.stream(model=MODEL, input="Hello") as helper:
        assert (await helper.get_final_response()).output_text == "Hello there!"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_off_says_so(served: Served, stream: bool):
    given = {"model": MODEL, "input": "Hello", "max_output_tokens": 5}
    if stream:
        found = await served.openai.responses.create(**given, stream=True)
        last = [event async for event in found][-1]
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = await served.openai.responses.create(**given)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "Hello"


async def test_an_error_in_mid_stream_is_raised(served: Served):
    served.answerer.step_seconds = 0.01
    served.answerer.reply = lambda g: [
        served.answerer.output(g, 0, [70]),
        Failed(id=g.id, attempt=g.attempt, status=503, message="shed", type="x", code="y"),
    ]
    stream = await served.openai.responses.create(model=MODEL, input="Hello", stream=True)
    with pytest.raises(openai.APIError, match="shed"):
        [event async for event in stream]
    served.answerer.reply = lambda g: [
        Failed(id=g.id, attempt=g.attempt, status=503, message="shed", type="x", code="y")
    ]
    with pytest.raises(openai.InternalServerError, match="shed"):
        await served.openai.responses.create(model=MODEL, input="Hello", stream=True)


REFUSED = [
    ({"store": True}, "store", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"conversation": "c"}, "conversation", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_parameter"),
    ({"text": {"format": {"type": "json_object"}}}, "text", "unsupported_parameter"),
    ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"input": [{"type": "function_call_output"}]}, "input", "unsupported_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "unsupported_parameter",
    ),
    ({"messages": []}, "messages", "unknown_parameter"),
    ({"input": ""}, "input", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 7}, "input", "invalid_value"),
    ({"input": ["x"]}, "input", "invalid_value"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": "many"}, "max_output_tokens", "invalid_type"),
    ({"temperature": 9}, "temperature", "invalid_value"),
    ({"input": "x" * 600}, "input", "context_length_exceeded"),
]


async def test_what_is_not_there_is_refused_by_name(served: Served):
    for changes, param, code in REFUSED:
        body = {"model": MODEL, "input": "Hello", **changes}
        response = await served.http.post("/v1/responses", json=body)
        assert response.status_code == 400, changes
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, code), changes
    neutral = {"store": False, "tools": [], "text": {"format": {"type": "text"}}, "include": []}
    good = await served.http.post("/v1/responses", json={"model": MODEL, "input": "a", **neutral})
    assert good.status_code == 200
    missing = await served.http.post("/v1/responses", json={"model": "other", "input": "a"})
    assert missing.status_code == 404
    assert (await served.http.get("/v1/responses")).status_code == 405
    assert (await served.http.get("/v1/responses/resp_1")).status_code == 404


async def test_emulated_answers_are_marked_and_feedback_finds_them(
    start, redis, tiny_folder, tmp_path
):
    from tests.gateway.replica import controlled

    async with (
        start(tenants={"": {"feedback_adapter": "desk"}}) as served,
        controlled(redis, f"{MODEL}-r0", tmp_path),
    ):
        response = await served.openai.responses.create(model=MODEL, input="Hello")
        assert response.model_extra is not None
        assert response.model_extra["system_fingerprint"] is None
        told = await served.http.post(
            "/v1/feedback", json={"request_id": response.id, "rating": "good"}
        )
        assert told.json()["stored"] is True, told.text
        await register(redis, MODEL, tiny_folder, engine="emulated")
        await served.gateway.catalogue.refresh()
        raw = await served.http.post("/v1/responses", json={"model": MODEL, "input": "a"})
        assert json.loads(raw.text)["system_fingerprint"] == "emulated"
