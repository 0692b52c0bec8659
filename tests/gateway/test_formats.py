"""Log probabilities, echo, structured answers, tools."""

from __future__ import annotations

import json

import pytest

from services.gateway.tools import Calls
from tests import tiny
from tests.gateway.answerer import says
from tests.gateway.conftest import MODEL, Served

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


async def test_chat_logprobs_name_each_token_its_bytes_and_alternatives(served: Served):
    served.answerer.script = says("Hi€")
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [bytes(t.bytes) for t in content] == [b"H", b"i", b"\xe2", b"\x82", b"\xac"]
    assert all(t.logprob == -0.5 and len(t.top_logprobs) == 2 for t in content)
    assert served.answerer.seen[0].sampling.logprobs == 2


async def test_streamed_logprobs_are_those_of_the_whole_answer(served: Served):
    served.answerer.script = says("Hi€!")
    stream = await served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, stream=True
    )
    tokens = []
    async for chunk in stream:
        if chunk.choices[0].logprobs:
            tokens += [bytes(t.bytes) for t in chunk.choices[0].logprobs.content]
    assert b"".join(tokens).decode() == "Hi€!"


async def test_completion_logprobs_have_tokens_offsets_and_alternatives(served: Served):
    answer = await served.openai.completions.create(model=MODEL, prompt="x", logprobs=1)
    found = answer.choices[0].logprobs
    assert found.tokens == list("Hello there!")
    assert found.text_offset == list(range(12))
    assert len(found.top_logprobs[0]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer(served: Served, stream):
    answer = await served.openai.completions.create(
        model=MODEL, prompt=["one ", "two "], echo=True, stream=stream
    )
    texts = {0: "", 1: ""}
    if stream:
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        texts = {c.index: c.text for c in answer.choices}
    assert texts == {0: "one Hello there!", 1: "two Hello there!"}


async def test_a_response_format_reaches_the_engine_as_a_schema(served: Served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    await served.chat(response_format={"type": "json_object"})
    await served.chat(response_format=named)
    free, bound = (json.loads(g.sampling.grammar) for g in served.answerer.seen)
    assert free == {"type": "object"}
    assert bound == schema


CASES_A_BAD_RESPONSE_FORMAT_IS_REF = [
    {"type": "xml"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "objekt"}}},
    {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"$ref": "http://other/schema"}},
    },
    {},
]


async def test_a_bad_response_format_is_refused_by_name(served: Served):
    for response_format in CASES_A_BAD_RESPONSE_FORMAT_IS_REF:
        response = await served.chat(response_format=response_format)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"


async def test_tools_are_refused_by_name_where_the_template_has_no_place(served: Served):
    response = await served.chat(tools=[WEATHER])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


@pytest.fixture
def tool_folder(tmp_path):
    """The tiny model with a template that shows tools, calls and their results."""
    folder = tiny.write_config(tmp_path / "tools")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}\n"
        "{% endfor %}"
    )
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture
async def with_tools(start, tool_folder):
    async with start(models={MODEL: {"path": str(tool_folder)}}) as served:
        yield served


async def test_tools_go_through_the_template_and_calls_come_back(with_tools: Served):
    with_tools.answerer.script = says(f"Let me see. {CALL}{CALL}")
    answer = await with_tools.openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER]
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see. "
    calls = choice.message.tool_calls
    assert [c.function.name for c in calls] == ["weather", "weather"]
    assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
    prompt = with_tools.gateway.catalogue.now.models[MODEL].vocabulary.decode(
        with_tools.answerer.seen[0].prompt
    )
    assert "Weather of a city" in prompt


async def test_streamed_calls_are_never_shown_as_text(with_tools: Served):
    with_tools.answerer.script = says(f"Let me see. {CALL}")
    stream = await with_tools.openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], stream=True
    )
    text, calls, finish = "", [], None
    async for chunk in stream:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += delta.tool_calls or []
        finish = chunk.choices[0].finish_reason or finish
    assert text == "Let me see. "
    assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
    assert finish == "tool_calls"


async def test_earlier_calls_and_results_are_rendered(with_tools: Served):
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await with_tools.openai.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    prompt = with_tools.gateway.catalogue.now.models[MODEL].vocabulary.decode(
        with_tools.answerer.seen[0].prompt
    )
    assert "assistant: Bonn" in prompt
    assert "tool: rain" in prompt


@pytest.mark.parametrize(
    ("text", "said", "made"),
    [
        ("just text", "just text", 0),
        ('{"name": "f", "parameters": {"a": 1}}', "", 1),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", 2),
        ('{"no": "call"}', '{"no": "call"}', 0),
        ("a <tool_call>{broken", "a <tool_call>{broken", 0),
        ("a <tool_", "a <tool_", 0),
        ("[not json", "[not json", 0),
        ("", "", 0),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_is_no_call_is_text_however_it_arrives(text, said, made, step):
    calls = Calls(parallel=True)
    shown = "".join(calls.push(text[i : i + step]) for i in range(0, len(text), step))
    rest, found = calls.finish()
    assert shown + rest == said
    assert len(found) == made
