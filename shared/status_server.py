"""A small HTTP server for a process without a web framework: metrics and health.

``live`` and ``ready`` return None when all is well, else the reason; red answers are 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

log = logging.getLogger(__name__)

Check = Callable[[], str | None]

_REQUEST_LIMIT = 8192  # bytes of request head that are read
_READ_SECONDS = 5.0


class StatusServer:
    """Serves GET requests one a connection."""

    def __init__(
        self,
        registry: CollectorRegistry,
        live: Check,
        ready: Check,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``refresh`` is awaited before each page of metrics: what is gathered only when asked."""
        self._registry, self._refresh = registry, refresh
        self._checks = {"/health/live": live, "/health/ready": ready, "/health": ready}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen (port 0: any free one); returns the port. Raises OSError when it is taken."""
        self._server = await asyncio.start_server(self._answer, host, port, limit=_REQUEST_LIMIT)
        bound: int = self._server.sockets[0].getsockname()[1]
        log.info("metrics and health on http://%s:%d", host, bound)
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _READ_SECONDS)
            status, kind, body = await self._page(head)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError) as e:
            log.debug("status connection ended early: %s", e)
        finally:
            writer.close()

    async def _page(self, head: bytes) -> tuple[str, str, bytes]:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        path = words[1].split("?")[0] if len(words) == 3 else ""
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"GET only\n"
        if path == "/metrics":
            if self._refresh is not None:
                await self._refresh()
            return "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path in self._checks:
            reason = self._checks[path]()
            status = "200 OK" if reason is None else "503 Service Unavailable"
            answer = {"status": "ok"} if reason is None else {"status": "red", "reason": reason}
            return status, "application/json", orjson.dumps(answer) + b"\n"
        known = ", ".join(["/metrics", *self._checks])
        return "404 Not Found", "text/plain", f"no such page; known: {known}\n".encode()
