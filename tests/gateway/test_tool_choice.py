"""A call that a client demands is made: the engine can write nothing else."""

from __future__ import annotations

import json

import openai
import pytest

from services.gateway import tools, wire
from services.gateway.errors import ApiError
from services.replica.engines.torch.grammar import Grammars
from tests.gateway.answerer import says, tokens_of
from tests.gateway.conftest import MODEL, Served
from tests.gateway.test_formats import HELLO, WEATHER, tool_folder, with_tools

__all__ = ["tool_folder", "with_tools"]  # fixtures

PLACE = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "type": "object",
            "$defs": {"side": {"enum": ["left", "right"]}},
            "properties": {"to": {"$ref": "#/$defs/side"}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "go"}}


def demanded(choice: object, **more: object) -> str:
    body = {"model": MODEL, "messages": HELLO, "tools": [WEATHER, PLACE], "tool_choice": choice}
    found = tools.demanded(wire.chat_request(json.dumps({**body, **more}).encode()), None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("choice", "call", "allowed"),
    [
        ("required", '{"name":"go","arguments":{"to":"left"}}', True),
        ("required", '{"name":"weather","arguments":{', True),
        (NAMED, '{"name":"go","arguments":{"to":"right"}}', True),
        (NAMED, '{"name":"weather"', False),
        (NAMED, '{"name":"go","arguments":{"to":"up', False),
        ("required", "Hello", False),
    ],
)
def test_the_engines_grammar_allows_calls_of_the_tools_and_nothing_else(
    tiny_folder, choice, call, allowed
):
    grammar = Grammars(tiny_folder, 259).start(demanded(choice), ())
    tokens = tokens_of(call)

    def accepted() -> bool:
        try:
            for token in tokens:
                grammar.accept(token)
        except ValueError:
            return False
        return True

    assert accepted() == allowed


async def test_a_demanded_call_comes_back_as_one(with_tools: Served):
    with_tools.answerer.script = says('{"name":"go","arguments":{"to":"left"}}')
    for choice in ("required", NAMED):
        answer = await with_tools.openai.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[WEATHER, PLACE], tool_choice=choice
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("go", '{"to": "left"}')
    assert all(g.sampling.grammar for g in with_tools.answerer.seen)
    await with_tools.openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER, PLACE], tool_choice="auto"
    )
    assert with_tools.answerer.seen[-1].sampling.grammar is None


async def test_demands_that_cannot_be_met_are_refused_by_name(with_tools: Served):
    other = {"type": "function", "function": {"name": "fly"}}
    for choice in (other, "always", {"type": "custom"}, 3):
        with pytest.raises(openai.BadRequestError) as caught:
            await with_tools.openai.chat.completions.create(
                model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice=choice
            )
        assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as caught:
        await with_tools.openai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[WEATHER],
            tool_choice="required",
            response_format={"type": "json_object"},
        )
    assert caught.value.param == "tool_choice"
    bad = {"type": "function", "function": {"name": "x", "parameters": {"type": "objxect"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await with_tools.openai.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[bad], tool_choice="required"
        )
    assert caught.value.param == "tools"


def test_a_demanded_call_may_not_point_outside_of_its_schema():
    tool = {"type": "function", "function": {"name": "x", "parameters": {"$ref": "http://a/b"}}}
    with pytest.raises(ApiError) as caught:
        demanded("required", tools=[tool])
    assert caught.value.param == "tools"
