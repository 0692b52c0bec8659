"""A lean HTTP/1.1 client: one asyncio protocol a connection, parsed in C by httptools.

A general client spends most of a small streaming request on its own layers, and the load
generator shares the cores with what it measures (docs/performance.md has the comparison).
Here a response's bytes go straight to a ``Receiver`` with the time at which they arrived.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 10.0


class HttpError(ConnectionError):
    """No complete response came: refused, cut, timed out or not HTTP."""


class StaleConnection(HttpError):
    """A kept connection was closed before the first byte of an answer: safe to send again."""


class Receiver(Protocol):
    """Takes one response as it arrives; ``now`` is ``time.perf_counter()``."""

    def on_response(self, status: int, headers: dict[str, str], now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...


class _Connection(asyncio.Protocol):
    """One connection with one exchange at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._now = 0.0
        self._bytes_seen = False
        self._used = False
        self.reusable = False

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send a request and feed its response to ``receiver``. Raises HttpError."""
        if self._transport is None or self._transport.is_closing():
            kind = StaleConnection if self._used else HttpError
            raise kind("the server closed the connection before a request was sent")
        self._parser = httptools.HttpResponseParser(self)
        self._receiver, self._headers = receiver, {}
        self._bytes_seen, self.reusable = False, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = self._receiver = None
            self._used = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._bytes_seen = True
        if self._done is None or self._done.done():
            self.close()  # bytes that nobody asked for: this connection is out of step
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(HttpError(f"not an HTTP response: {e}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if not self._bytes_seen and self._used:
            self._fail(StaleConnection("the server closed the kept connection"))
        elif self._bytes_seen and exc is None and self._ends_with_connection():
            self._finish()
        else:
            self._fail(HttpError(f"connection closed in mid-answer{f': {exc}' if exc else ''}"))

    def _ends_with_connection(self) -> bool:
        return bool(self._headers) and not (
            "content-length" in self._headers or "transfer-encoding" in self._headers
        )

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: HttpError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._receiver is not None:
            status = self._parser.get_status_code()
            self._receiver.on_response(status, self._headers, self._now)

    def on_body(self, body: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_body(body, self._now)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._finish()


class Client:
    """Connections to one server, kept open and used again, last used first."""

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base URL {base_url!r}: http://host:port or https://host expected")
        self._host, tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if tls else 80)
        self._ssl = ssl.create_default_context() if tls else None
        self._prefix = parts.path.rstrip("/")
        self._common = {"host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._idle: list[_Connection] = []
        self.opened = 0

    async def request(
        self,
        method: str,
        path: str,
        receiver: Receiver,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """One exchange. A closed kept connection is replaced once; raises HttpError."""
        message = self._message(method, path, body, headers or {})
        try:
            async with asyncio.timeout(timeout):
                while self._idle:
                    try:
                        return await self._on(self._idle.pop(), message, receiver)
                    except StaleConnection:
                        continue  # the loop ends: each turn takes one kept connection away
                await self._on(await self._connect(), message, receiver)
        except TimeoutError as e:
            raise HttpError(f"no complete answer within {timeout:g} s") from e

    async def _on(self, connection: _Connection, message: bytes, receiver: Receiver) -> None:
        try:
            await connection.exchange(message, receiver)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as e:
            raise HttpError(f"no connection to {self._host}:{self._port} in time") from e
        except OSError as e:
            raise HttpError(f"no connection to {self._host}:{self._port}: {e}") from e
        self.opened += 1
        return connection

    def _message(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._common, **headers}.items()]
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    def close(self) -> None:
        """Close what is kept open."""
        while self._idle:
            self._idle.pop().close()
