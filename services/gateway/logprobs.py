"""Log probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

from typing import Any

from services.gateway.answer import Choice
from services.gateway.errors import bad_value
from services.gateway.wire import ChatRequest, CompletionRequest

MOST_CHAT = 20
MOST_COMPLETION = 5


def wanted_chat(request: ChatRequest) -> int | None:
    """How many alternatives a token; None: no log probabilities. Raises ApiError 400."""
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MOST_CHAT:
        raise bad_value("top_logprobs", f"top_logprobs must lie between 0 and {MOST_CHAT}")
    if top and not request.logprobs:
        raise bad_value("top_logprobs", "top_logprobs needs logprobs: true")
    return (top or 0) if request.logprobs else None


def wanted_completion(request: CompletionRequest) -> int | None:
    """Likewise for /v1/completions. Raises ApiError 400."""
    count = request.logprobs
    if count is not None and not 0 <= count <= MOST_COMPLETION:
        raise bad_value("logprobs", f"logprobs must lie between 0 and {MOST_COMPLETION}")
    if count is not None and request.echo:
        raise bad_value("logprobs", "logprobs of the prompt (with echo) are not supported")
    return count


def chat(choice: Choice, start: int, end: int) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat for tokens ``start`` to ``end``."""
    if choice.request.sampling.logprobs is None:
        return None
    content = []
    for token, found in _pairs(choice, start, end):
        entry = _entry(choice, token, found.logprob)
        entry["top_logprobs"] = [_entry(choice, top.token, top.logprob) for top in found.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion(choice: Choice, start: int, end: int) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a completion; ``text_offset`` counts from the answer's start."""
    if choice.request.sampling.logprobs is None:
        return None
    offset = sum(len(_text(choice, token)) for token, _ in _pairs(choice, 0, start))
    tokens, values, tops, offsets = [], [], [], []
    for token, found in _pairs(choice, start, end):
        text = _text(choice, token)
        tokens.append(text)
        values.append(found.logprob)
        tops.append({_text(choice, top.token): top.logprob for top in found.top})
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _pairs(choice: Choice, start: int, end: int) -> list[tuple[int, Any]]:
    end = min(end, choice.visible_tokens)
    return list(zip(choice.tokens[start:end], choice.logprobs[start:end], strict=False))


def _entry(choice: Choice, token: int, logprob: float) -> dict[str, Any]:
    raw = choice.model.vocabulary.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _text(choice: Choice, token: int) -> str:
    return choice.model.vocabulary.token_bytes(token).decode("utf-8", "replace")
