"""POST /v1/responses: one text answer to one input, as OpenAI's newer API words it.

A subset that keeps nothing between requests: text or messages in, text out, whole or as events.
What else that API has (tools, stored responses, reasoning, files) is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from services.gateway.answer import Answer, Choice
from services.gateway.errors import ApiError, bad_value, unsupported
from services.gateway.http import Exchange
from services.gateway.wire import ChatRequest, parse, refuse

if TYPE_CHECKING:
    from services.gateway.service import Gateway


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses. ``input``: a text, or messages with role and content."""

    model: str
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None

    # accepted: they cannot change an answer
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None

    # refused unless they say nothing (see REFUSED)
    store: Any = None
    background: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    reasoning: Any = None
    text: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    truncation: Any = None


# Parameter -> values that leave the answer as it is (null always does).
REFUSED: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
PARTS = ("input_text", "output_text")
# What the parts shared with chats call a parameter -> its name here.
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_FIELDS = tuple((name, neutral, None) for name, neutral in REFUSED.items())
_decoder = msgspec.json.Decoder(ResponseRequest)


def response_request(body: bytes) -> ResponseRequest:
    """Raises ApiError 400 naming the parameter at fault."""
    request = parse(_decoder, body)
    refuse(request, _FIELDS)
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise bad_value("max_output_tokens", "max_output_tokens must be at least 1")
    return request


def as_chat(request: ResponseRequest) -> ChatRequest:
    """The same question as a chat. Raises ApiError 400."""
    messages = _messages(request.input)
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
    )


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_value("input", "input: a text, or a list of messages, expected")
    return [_message(f"input[{i}]", item) for i, item in enumerate(given)]


def _message(where: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise bad_value("input", f"{where}: an object with role and content expected")
    kind = item.get("type", "message")
    if kind != "message":
        raise unsupported("input", f"{where} has type {kind!r}; only messages are taken")
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad_value(
            "input", f"{where}.role: user, assistant, system or developer expected, got {role!r}"
        )
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{k}]", p) for k, p in enumerate(content))
    if not isinstance(content, str):
        raise bad_value("input", f"{where}.content: a text (or a list of text parts) expected")
    return {"role": role, "content": content}


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in ("input_image", "input_file", "input_audio", "refusal"):
        raise unsupported("input", f"{where} has type {kind!r}; the models here read text only")
    raise bad_value("input", f'{where}: an object {{"type": "input_text", "text": …}} expected')


class Responses:
    """The route; a chat's way to the engine and back, in other words."""

    def __init__(self, gateway: Gateway) -> None:
        self._settings, self._clock = gateway.settings, gateway.clock
        self._generation = gateway.generation

    async def create(self, exchange: Exchange) -> None:
        body = await exchange.body(self._settings.max_body_bytes, self._settings.body_timeout)
        received = self._clock()
        request = response_request(body)
        chat = as_chat(request)
        try:
            answer, _ = await self._generation.prepare(exchange, chat, len(body), received)
        except ApiError as e:
            e.param = NAMES.get(e.param or "", e.param)
            raise
        await self._generation.serve(exchange, answer, ResponseForm(request, answer), False)
        self._generation.remember(exchange, chat, answer)


class ResponseForm:
    """``response``, whole and as events."""

    end = b""  # response.completed was the last event

    def __init__(self, request: ResponseRequest, answer: Answer) -> None:
        self._request, self._answer = request, answer
        self._item = f"msg_{answer.id}"
        self._number = 0
        self._place = {"item_id": self._item, "output_index": 0, "content_index": 0}

    def whole(self, answer: Answer) -> bytes:
        return orjson.dumps(self._response(answer.choices[0]))

    def first(self, choice: Choice) -> bytes:
        opened = self._response(None)
        return b"".join(
            (
                self._event("response.created", response=opened),
                self._event("response.in_progress", response=opened),
                self._event(
                    "response.output_item.added", output_index=0, item=self._message("in_progress")
                ),
                self._event("response.content_part.added", **self._place, part=_text("")),
            )
        )

    def piece(self, choice: Choice) -> bytes:
        text, _, _ = choice.fresh()
        if not text:
            return b""
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def last(self, choice: Choice) -> bytes:
        text, whole = choice.text(), self._response(choice)
        return b"".join(
            (
                self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place, part=_text(text)),
                self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
                self._event(f"response.{whole['status']}", response=whole),
            )
        )

    def usage(self, answer: Answer) -> bytes:
        return b""  # the last event has it

    def error(self, error: ApiError) -> bytes:
        """With ``error`` as every error has it: that is what clients raise by."""
        return self._event(
            "error", code=error.code, message=error.message, param=error.param, **error.content()
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"".join((b"event: ", kind.encode(), b"\ndata: ", data, b"\n\n"))

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": list(content),
        }

    def _response(self, choice: Choice | None) -> dict[str, Any]:
        """``choice`` once it has ended; None: as the stream opens."""
        request, answer = self._request, self._answer
        status, output, usage = "in_progress", [], None
        if choice is not None:
            status = "incomplete" if choice.finish == "length" else "completed"
            output, usage = [self._message(status, _text(choice.text()))], _usage(answer)
        emulated = answer.choices[0].model.card.emulated
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": int(answer.received),
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": request.user,
            "metadata": request.metadata or {},
            "system_fingerprint": "emulated" if emulated else None,
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(answer: Answer) -> dict[str, Any]:
    prompt = answer.prompt_tokens
    written = sum(len(c.tokens) for c in answer.choices)
    cached = min(prompt, sum(c.cached_tokens for c in answer.choices))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + written,
    }
