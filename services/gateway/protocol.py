"""uvicorn's httptools protocol with limits of its own: size of the head, time for it to arrive.

Without them one client could hold connections for ever or fill the memory with headers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import ApiError

HEAD_SECONDS = 15.0
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class LimitedProtocol(HttpToolsProtocol):
    """``max_head_bytes`` is set by ``limited``."""

    max_head_bytes = 32 << 10
    head_seconds = HEAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._received = 0  # bytes since the head began
        self._in_head = True
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            self._received += len(data)
            if self._received > self.max_head_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        self._head_bytes = self._received = 0
        self._in_head = True
        self._start_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in the shape of all other errors."""
        self._refuse(ApiError(400, "the request is not valid HTTP"))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes and not self._refused:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(ApiError(431, f"the headers are larger than {self.max_head_bytes} bytes"))

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_head and not self._refused:
            self._refuse(
                ApiError(
                    408,
                    f"the headers did not arrive within {self.head_seconds:g} s",
                    type="timeout_error",
                )
            )

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        self._stop_timer()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {REASONS[error.status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited(max_head_bytes: int) -> type[LimitedProtocol]:
    """The protocol class with this limit."""
    return type("LimitedProtocol", (LimitedProtocol,), {"max_head_bytes": max_head_bytes})
