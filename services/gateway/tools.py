"""Tool calls: tools go through the model's chat template, calls come out of its text.

Formats that are understood: ``<tool_call>{…}</tool_call>`` (Hermes, Qwen, SmolLM; an object or a
list), and a whole answer that is such an object or list (Llama 3's ``name``/``parameters``,
Mistral once its special token is gone).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.catalogue import ServedModel
from services.gateway.errors import bad_value, unsupported
from services.gateway.structured import schema_text
from services.gateway.text import StopScanner
from services.gateway.wire import ChatRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def offered(request: ChatRequest, model: ServedModel) -> list[dict[str, Any]] | None:
    """The tools to render into the prompt; None: none. Raises ApiError 400."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_value("tool_choice", "tool_choice is allowed only with tools")
        return None
    if choice == "none":
        return None
    for i, tool in enumerate(request.tools):
        _check(i, tool)
    if not model.knows_tools:
        raise unsupported("tools", f"the chat template of {model.name!r} has no place for them")
    return request.tools


def _check(i: int, tool: Mapping[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_value("tools", f"tools[{i}]: type 'function' with a function object expected")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_value("tools", f"tools[{i}].function.name: a text expected")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise bad_value("tools", f"tools[{i}].function.parameters: a JSON schema expected")


def demanded(request: ChatRequest, grammar: str | None) -> str | None:
    """The schema of an answer that must be a call; None where it need not be one.

    One object ``{"name": …, "arguments": …}`` of the tools that may be called, which ``Calls``
    reads back. Raises ApiError 400.
    """
    choice = request.tool_choice
    if not request.tools or choice in (None, "auto", "none"):
        return None
    tools = request.tools
    if choice != "required":
        name = _named(choice)
        tools = [t for t in tools if t["function"]["name"] == name]
        if not tools:
            raise bad_value("tool_choice", f"tool_choice: no tool is named {name!r}")
    if grammar is not None:
        raise bad_value("tool_choice", "a demanded call and a response_format exclude each other")
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": _moved(
                    tool["function"].get("parameters") or {"type": "object"},
                    f"#/anyOf/{i}/properties/arguments",
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return schema_text({"anyOf": options}, "tools")


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict) and choice.get("type") == "function":
        return str(function.get("name"))
    raise unsupported("tool_choice", "none, auto, required and a named function are")


def _moved(schema: Any, to: str) -> Any:
    """The schema for a place inside another: its references start at their old root."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, to)
        for key, value in schema.items()
    }


def for_template(calls: Sequence[Any]) -> list[Any]:
    """Earlier calls as templates expect them: arguments as objects rather than JSON text."""
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise bad_value("messages", "tool_calls: objects with a function expected")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError as e:
                raise bad_value("messages", f"tool_calls: arguments are not JSON: {e}") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


class Calls:
    """Splits one choice's text into what is said and the calls that are made."""

    def __init__(self, parallel: bool) -> None:
        self._parallel = parallel
        self._scanner = StopScanner((OPEN,))
        self._held = ""  # from the first call on
        self._in_call = False
        self._started = False

    def push(self, piece: str) -> str:
        """Text that is certainly not part of a call."""
        if self._in_call:
            self._held += piece
            return ""
        if not self._started and (self._held + piece).lstrip()[:1] in ("", "{", "["):
            self._held += piece  # may be a call as a whole: known at the end
            return ""
        if not self._started:
            piece, self._held, self._started = self._held + piece, "", True
        shown, met = self._scanner.push_keeping(piece)
        if met is not None:
            self._in_call, self._held = True, met
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Remaining text and the calls; what is no call after all is text."""
        if self._in_call:
            calls = [call for block in _blocks(self._held) for call in block]
            text = "" if calls else self._held
        elif not self._started:
            calls, text = _parse(self._held.strip()), self._held
            text = "" if calls else text
        else:
            return self._scanner.flush(), []
        return text, calls if self._parallel else calls[:1]


def _blocks(text: str) -> list[list[dict[str, Any]]]:
    parts = text.split(OPEN)[1:]
    return [_parse(part.split(CLOSE)[0].strip()) for part in parts]


def _parse(text: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form; [] when the text is no call."""
    if not text.startswith(("{", "[")):
        return []
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return []
    found = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return []
        arguments = item.get("arguments", item.get("parameters"))
        if not isinstance(arguments, dict | str):
            return []
        found.append(
            {
                "id": f"call_{os.urandom(12).hex()}",
                "type": "function",
                "function": {
                    "name": item["name"],
                    "arguments": arguments
                    if isinstance(arguments, str)
                    else json.dumps(arguments, ensure_ascii=False),
                },
            }
        )
    return found
