"""From messages or prompts to token ids; long texts are tokenised in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from services.gateway.catalogue import ServedModel
from services.gateway.errors import ApiError, bad_value, unsupported
from services.gateway.params import token_prompt
from services.gateway.tools import for_template
from services.gateway.wire import ChatRequest
from shared.chat import ChatError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
LONG = 16_000  # characters; tokenising them takes some milliseconds
MAX_PROMPTS = 2048

T = TypeVar("T")


async def _run(size: int, work: Callable[[], T]) -> T:
    """Short work here, long work beside the event loop (tokenising releases the GIL)."""
    return work() if size < LONG else await asyncio.to_thread(work)


async def chat_prompt(
    request: ChatRequest,
    model: ServedModel,
    size: int,
    tools: Sequence[dict[str, Any]] | None = None,
) -> tuple[int, ...]:
    """Token ids of a chat. ``size`` = bytes of the body. Raises ApiError 400."""
    messages = check_messages(request.messages)
    extra = _template_variables(request.chat_template_kwargs)

    def work() -> tuple[int, ...]:
        text = model.tokenizer.render(messages, add_generation_prompt=True, tools=tools, **extra)
        return tuple(model.tokenizer.encode(text))

    try:
        return await _run(size, work)
    except ChatError as e:
        raise bad_value("messages", str(e)) from None


RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "self"})


def _template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    for name in given or ():
        if name in RESERVED or name.endswith("_token"):
            raise bad_value("chat_template_kwargs", f"{name!r} cannot be given here")
    return given or {}


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates expect them: contents as text. Raises ApiError 400."""
    if not messages:
        raise bad_value("messages", "messages is empty: at least one is required")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{i}]"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise bad_value("messages", f"{where}.role: one of {known} expected, got {role!r}")
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{k}]", p) for k, p in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise bad_value("messages", f"{where}.content: a text (or a list of text parts) expected")
    # No template knows the newer name of the system role.
    checked = {**message, "role": "system" if role == "developer" else role, "content": content}
    if message.get("tool_calls"):
        checked["tool_calls"] = for_template(message["tool_calls"])
    return checked


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in ("image_url", "input_audio", "file"):
        raise unsupported("messages", f"{where} has type {kind!r}; the models here read text only")
    raise bad_value("messages", f'{where}: an object {{"type": "text", "text": …}} expected')


async def completion_prompts(
    prompt: Any, model: ServedModel, special: bool, size: int
) -> list[tuple[int, ...]]:
    """Token ids of each prompt: a text, texts, token ids, or lists of them.

    ``size`` = bytes of the body. Raises ApiError 400.
    """
    prompts = _split(prompt)

    def work() -> list[tuple[int, ...]]:
        return [_ids(item, model, special) for item in prompts]

    return await _run(size, work)


def _ids(prompt: str | list[int], model: ServedModel, special: bool) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return token_prompt(prompt, model.card.vocabulary)
    ids = model.tokenizer.encode(prompt, add_special_tokens=special)
    if not ids:
        raise bad_value("prompt", "the prompt is empty")
    return tuple(ids)


def _split(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if not prompt:
            raise bad_value("prompt", "the prompt is empty")
        if _are_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise bad_value("prompt", f"at most {MAX_PROMPTS} prompts a request")
        if all(isinstance(p, str) or _are_ids(p) for p in prompt):
            return prompt
    raise ApiError(
        400,
        "prompt: a text, a list of texts, token ids, or a list of token id lists expected",
        param="prompt",
        code="invalid_type",
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
