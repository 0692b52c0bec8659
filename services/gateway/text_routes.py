"""/tokenize, /detokenize, /version, and the routes that are refused clearly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response

from services.gateway import prompts
from services.gateway.errors import ApiError, bad_value
from services.gateway.params import token_prompt
from services.gateway.routes import body_of, caller, json
from services.gateway.wire import ChatRequest

if TYPE_CHECKING:
    from services.gateway.service import Gateway


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a prompt or messages, as in vLLM."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: str
    tokens: list[int]


# Route of OpenAI's API -> why it is not here, and what to do instead.
REFUSED = {
    "/v1/embeddings": (
        "Embeddings are not offered: the models served here are trained to continue texts, and "
        "what they hold inside makes poor embeddings. Use a model made for it"
    ),
}

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def add(app: FastAPI, gateway: Gateway, version: str) -> None:
    @app.get("/version")
    async def show_version() -> Response:
        return json({"version": version})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text (with special tokens) or of a chat through its template."""
        asked = await body_of(request, gateway, _tokenize)
        target = await gateway.generation.target(asked.model, caller(request), needs_replica=False)
        model = target.model
        if (asked.prompt is None) == (asked.messages is None):
            raise bad_value("prompt", "either prompt or messages is required")
        if asked.messages is not None:
            if not asked.add_generation_prompt:
                raise bad_value("add_generation_prompt", "only true is supported")
            chat = ChatRequest(model=asked.model, messages=asked.messages)
            size = sum(len(str(m)) for m in asked.messages)
            ids = await prompts.chat_prompt(chat, model, size)
        else:
            text = asked.prompt or ""
            (ids,) = await prompts.completion_prompts(
                text, model, asked.add_special_tokens, len(text)
            )
        answer = {"count": len(ids), "max_model_len": model.card.context, "tokens": ids}
        if asked.return_token_strs:
            answer["token_strs"] = [
                model.vocabulary.token_bytes(t).decode("utf-8", "replace") for t in ids
            ]
        return json(answer)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens left out."""
        asked = await body_of(request, gateway, _detokenize)
        target = await gateway.generation.target(asked.model, caller(request), needs_replica=False)
        if not asked.tokens:
            return json({"prompt": ""})
        ids = token_prompt(asked.tokens, target.model.card.vocabulary)
        return json({"prompt": target.model.vocabulary.decode(ids)})

    for path, why in REFUSED.items():
        _refuse(app, path, why)


def _refuse(app: FastAPI, path: str, why: str) -> None:
    @app.post(path)
    async def refused() -> Response:
        raise ApiError(404, f"{path}: {why}", code="unsupported_endpoint")
