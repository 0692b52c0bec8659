"""The outermost ASGI application: request ids, errors in OpenAI's shape, the busy routes.

The generation routes are answered here without FastAPI's machinery; everything else goes on
to FastAPI.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.gateway.access import Access
from services.gateway.cors import Cors
from services.gateway.errors import ApiError, ClientGone
from services.gateway.http import Exchange, Receive, Scope, Send
from services.gateway.metrics import Metrics
from services.gateway.tracing import Handler

log = logging.getLogger(__name__)

# What a probe or a scraper asks without a key.
OPEN = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/version"})
# What only an admin may do.
ADMIN = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """``routes``: path -> handler of its POST requests."""

    def __init__(
        self,
        routes: Mapping[str, Handler],
        rest: App,
        metrics: Metrics,
        access: Access,
        cors: Cors,
        admin_port: int | None = None,
    ) -> None:
        self._routes, self._rest = routes, rest
        self._metrics, self._access, self._cors = metrics, access, cors
        self._admin_port = admin_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        exchange = Exchange(scope, receive, self._counting(send))
        exchange.extra = self._cors.headers(exchange.headers)
        if (answer := self._cors.preflight(scope["method"], exchange.headers)) is not None:
            await exchange.start(204, answer)
            await exchange.write(b"", more=False)
            return
        if exchange.path not in OPEN:
            try:
                self._right_port(scope)
                exchange.caller = self._access.identify(exchange.headers)
            except ApiError as e:
                await exchange.fail(e)
                return
        handler = self._routes.get(exchange.path)
        if handler is None:
            await self._other(exchange, scope, receive)
        elif scope["method"] != "POST":
            exchange.extra += [(b"allow", b"POST")]
            await exchange.fail(
                ApiError(405, f"method {scope['method']} is not allowed on {exchange.path}")
            )
        else:
            await self._answer(exchange, handler)

    def _right_port(self, scope: Scope) -> None:
        """Admin routes have a port of their own where one is set. Raises ApiError 404."""
        if self._admin_port is None:
            return
        here = scope["server"][1] == self._admin_port
        if here != (scope["path"] in ADMIN):
            raise ApiError(404, f"no such route on this port: {scope['path'][:200]}")

    async def _answer(self, exchange: Exchange, handler: Handler) -> None:
        answered = False
        try:
            await handler(exchange)
            answered = True
        except ApiError as e:
            await exchange.fail(e)
            answered = True
        except ClientGone:
            answered = True  # nobody is there to be told
        finally:
            # A fault of ours goes on to the server, which logs it; the client is told first.
            if not answered and not exchange.started:
                await exchange.fail(crash())

    async def _other(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        """FastAPI's part, with the request id on its answers."""
        scope["state"] = {**scope.get("state", {}), "exchange": exchange}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.started = True
                extra = [*exchange.extra, (b"x-request-id", exchange.tag)]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await exchange.forward(message)

        await self._rest(scope, receive, send)

    def _counting(self, send: Send) -> Send:
        count = self._metrics.response

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        return counted


def crash() -> ApiError:
    return ApiError(500, "the server failed to answer this request", type="server_error")
