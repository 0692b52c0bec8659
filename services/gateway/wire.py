"""Request bodies of the OpenAI routes, parsed and checked in one pass.

A parameter that is not here, or that would change the answer and is not implemented, is
refused by name. Parameters that cannot change an answer (user, metadata, …) are accepted.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from services.gateway.errors import ApiError, unsupported


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is sent


class SloBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both generation routes take."""

    model: str
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    slo: SloBody | None = None
    priority: int = 0  # as in vLLM: a lower number goes first
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None

    # accepted: they cannot change an answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    # refused unless they say nothing (see REFUSED)
    logit_bias: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    kv_transfer_params: Any = None
    return_token_ids: Any = None


class ChatRequest(Parameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None


class CompletionRequest(Parameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. ``prompt``: text, texts, token ids, or lists of ids."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None


# Parameter -> values that leave the answer as it is (null always does).
REFUSED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "kv_transfer_params": (),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
REFUSED_CHAT: dict[str, tuple[Any, ...]] = {
    **REFUSED,
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
REFUSED_COMPLETION: dict[str, tuple[Any, ...]] = {**REFUSED, "suffix": ("",)}

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")

T = TypeVar("T", bound=msgspec.Struct)

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def chat_request(body: bytes) -> ChatRequest:
    """Raises ApiError 400 naming the parameter at fault."""
    request = parse(_chat, body)
    refuse(request, _CHAT_FIELDS)
    return request


def completion_request(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 naming the parameter at fault."""
    request = parse(_completion, body)
    refuse(request, _COMPLETION_FIELDS)
    return request


def parse(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A JSON body as a struct. Raises ApiError 400."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as e:
        raise _explain(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError(400, f"the request body is not valid JSON: {e}") from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply") from None


def _explain(text: str) -> ApiError:
    """msgspec's message as OpenAI's clients expect it, with the parameter by name."""
    at = _PATH.search(text)
    where = at.group(1) if at else ""
    if unknown := _UNKNOWN.search(text):
        name = f"{where}.{unknown.group(1)}" if where else unknown.group(1)
        return ApiError(
            400, f"unrecognised parameter {name!r}", param=name, code="unknown_parameter"
        )
    if missing := _MISSING.search(text):
        name = f"{where}.{missing.group(1)}" if where else missing.group(1)
        return ApiError(
            400, f"parameter {name!r} is required", param=name, code="missing_required_parameter"
        )
    name = where.split("[")[0].split(".")[0] or None
    message = text[: at.start()] if at else text
    return ApiError(400, f"{name}: {message}" if name else message, param=name, code="invalid_type")


def refuse(request: msgspec.Struct, fields: tuple[tuple[str, tuple[Any, ...], Any], ...]) -> None:
    """``fields``: name, values that say nothing, default. Raises ApiError 400."""
    for name, neutral, default in fields:
        value = getattr(request, name)
        if value is not default and value is not None and value not in neutral:
            raise unsupported(name)


def _with_defaults(
    refused: dict[str, tuple[Any, ...]], struct: type[msgspec.Struct]
) -> tuple[tuple[str, tuple[Any, ...], Any], ...]:
    defaults = {f.name: f.default for f in msgspec.structs.fields(struct)}
    return tuple((name, neutral, defaults[name]) for name, neutral in refused.items())


_CHAT_FIELDS = _with_defaults(REFUSED_CHAT, ChatRequest)
_COMPLETION_FIELDS = _with_defaults(REFUSED_COMPLETION, CompletionRequest)
