"""uvicorn as the gateway runs it: uvloop, httptools, no access log (it would be slow, and
paths and queries are nobody's business)."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from services.gateway import errors
from services.gateway.protocol import limited
from services.gateway.service import Gateway

log = logging.getLogger(__name__)

TELLING_SECONDS = 1  # what clients whose answers are cut have to be told


class Server(uvicorn.Server):
    """Tells the clients that it still answers when its grace is over, before they are cut off."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, grace: float) -> None:
        super().__init__(config)
        self._gateway, self._grace = gateway, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut(self) -> None:
        if count := len(self._gateway.desk):
            log.warning("%d answers are cut after %g s of grace", count, self._grace)
        self._gateway.desk.fail_all(
            errors.unavailable("this server is being stopped; ask again", retry_after=1.0)
        )


def server(gateway: Gateway) -> Server:
    """A server for this gateway; ``serve()`` runs until SIGTERM or ``should_exit``."""
    settings = gateway.settings
    grace = max(1, int(settings.shutdown_grace))
    return Server(
        uvicorn.Config(
            gateway.asgi,
            host=_allowed(gateway, settings.host),
            port=settings.port,
            loop="uvloop",
            http=limited(settings.max_header_bytes),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=grace + TELLING_SECONDS,
            backlog=2048,
        ),
        gateway,
        grace,
    )


def sockets(http: uvicorn.Server, gateway: Gateway) -> list[socket.socket] | None:
    """What ``serve`` takes: the port and the admin port, bound; None: the server's own port."""
    settings = gateway.settings
    if settings.admin_port is None:
        return None
    host = _allowed(gateway, settings.admin_host)
    admin = uvicorn.Config(gateway.asgi, host=host, port=settings.admin_port, log_config=None)
    return [http.config.bind_socket(), admin.bind_socket()]


def _allowed(gateway: Gateway, host: str) -> str:
    """The host, or loopback where everybody would be the operator."""
    if gateway.settings.may_listen(host):
        return host
    log.warning(
        "no keys file (COLLM_API_KEYS_FILE): listening on loopback only instead of %s; "
        "make keys with 'collm keys create', or set allow_open where others are kept out",
        host,
    )
    return "127.0.0.1"
