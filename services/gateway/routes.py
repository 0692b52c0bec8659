"""What the FastAPI routes share: callers, bodies, answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import orjson
from fastapi import Request, Response

from services.gateway import wire
from services.gateway.access import Principal
from services.gateway.errors import ApiError, bad_value
from services.gateway.http import Exchange

if TYPE_CHECKING:
    from services.gateway.service import Gateway

T = TypeVar("T", bound=msgspec.Struct)

MOST = 100  # items a page


def exchange_of(request: Request) -> Exchange:
    found: Exchange = request.state.exchange
    return found


def caller(request: Request) -> Principal:
    """Who is calling, as the front found out."""
    return exchange_of(request).caller


async def body_of(request: Request, gateway: Gateway, decoder: msgspec.json.Decoder[T]) -> T:
    """The JSON body. Raises ApiError 400, 408, 413."""
    settings = gateway.settings
    raw = await exchange_of(request).body(settings.max_body_bytes, settings.body_timeout)
    return wire.parse(decoder, raw)


def json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def respond(error: ApiError) -> Response:
    headers = {k.decode(): v.decode() for k, v in error.headers()}
    return Response(error.body(), error.status, headers, "application/json")


def not_found(what: str, name: str, param: str = "id") -> ApiError:
    return ApiError(404, f"no such {what}: {name}", param=param)


def page(items: Sequence[dict[str, Any]], request: Request) -> Response:
    """A list in OpenAI's form: ``after`` (an id) and ``limit`` (1 to 100, default 20)."""
    query = request.query_params
    text = query.get("limit", "20")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MOST:
        raise bad_value("limit", f"limit: a number from 1 to {MOST} expected")
    if after := query.get("after"):
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_value("after", "after: no such item in this list")
        items = items[at + 1 :]
    shown = items[: int(text)]
    return json(
        {
            "object": "list",
            "data": list(shown),
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > len(shown),
        }
    )
