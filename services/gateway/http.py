"""The thin layer over ASGI that the busy routes use: bodies with a limit, plain responses."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from services.gateway.access import Principal
from services.gateway.errors import ApiError, ClientGone, Headers

if TYPE_CHECKING:
    from services.gateway.tracing import Trace

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = (b"content-type", b"application/json")
LINGER_SECONDS = 2.0
LINGER_BYTES = 64 << 20
_GOOD_ID = re.compile(rb"[A-Za-z0-9._:-]{1,100}")


class Exchange:
    """One HTTP request as a handler sees it, and the one way to answer it."""

    __slots__ = (
        "_send",
        "caller",
        "extra",
        "headers",
        "id",
        "path",
        "receive",
        "started",
        "tag",
        "trace",
    )

    caller: Principal  # set once the key is checked

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self._send = send
        self.started = False  # the status line is out
        self.extra: Headers = []  # goes with every answer
        self.trace: Trace | None = None  # None: it is not traced
        own = os.urandom(12).hex()
        given = self.headers.get(b"x-request-id")
        # The client's id is shown back to it; inside, an id must be unique.
        if given is not None and _GOOD_ID.fullmatch(given):
            self.tag, self.id = given, f"{given.decode()}-{own[:8]}"
        else:
            self.tag, self.id = own.encode(), own

    async def body(self, limit: int, timeout: float) -> bytes:
        """The whole body. Raises ApiError 413 over ``limit`` bytes, 408 when it is too slow."""
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        message = await self._first(timeout)
        chunk: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(chunk) > limit:
                raise _too_large(limit)
            return chunk
        return await self._rest(chunk, limit, timeout)

    def bounded(self, limit: int) -> Receive:
        """``receive`` for another parser of the body; raises ApiError 413 beyond ``limit``."""
        size = 0

        async def receive() -> MutableMapping[str, Any]:
            nonlocal size
            message = await self.receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(limit)
            return message

        return receive

    async def _first(self, timeout: float) -> MutableMapping[str, Any]:
        """The body's first part, nearly always there already: asyncio.timeout would cost more
        than the rest of reading it."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        late = False

        def expire() -> None:
            nonlocal late
            late = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(timeout, expire)
        try:
            message = await self.receive()
        except asyncio.CancelledError:
            if late and task.uncancel() == 0:
                raise _too_slow(timeout) from None
            raise
        finally:
            timer.cancel()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def _rest(self, chunk: bytes, limit: int, timeout: float) -> bytes:
        chunks, size, more = [chunk], len(chunk), True
        try:
            async with asyncio.timeout(timeout):
                while more:
                    if size > limit:
                        raise _too_large(limit)
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    more = message.get("more_body", False)
        except TimeoutError:
            raise _too_slow(timeout) from None
        if size > limit:
            raise _too_large(limit)
        return b"".join(chunks)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self.extra, (b"x-request-id", self.tag)],
            }
        )

    async def write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def forward(self, message: MutableMapping[str, Any]) -> None:
        """A message of another application, as it is."""
        await self._send(message)

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """A whole answer at once."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [JSON, length, *(headers or ())])
        await self.write(body, more=False)

    async def fail(self, error: ApiError) -> None:
        if error.status not in (408, 413):
            await self.respond(error.status, error.body(), error.headers())
            return
        body = error.body()
        length = (b"content-length", str(len(body)).encode())
        close = (b"connection", b"close")
        await self.start(error.status, [JSON, length, close, *error.headers()])
        await self.write(body)
        if error.status == 413:
            await self._linger()
        await self.write(b"", more=False)

    async def _linger(self) -> None:
        """Take in some of the unread body: closing at once would reset the connection before
        the client has read the answer."""
        size = 0
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while size < LINGER_BYTES:
                    message = await self.receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return
        except TimeoutError:
            return


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes")


def _too_slow(timeout: float) -> ApiError:
    return ApiError(
        408, f"the request body did not arrive within {timeout:g} s", type="timeout_error"
    )
