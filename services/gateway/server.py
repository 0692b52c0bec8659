"""uvicorn as the gateway runs it: uvloop, httptools, no access log (it would be slow, and
paths and queries are nobody's business)."""

from __future__ import annotations

import logging
import socket

import uvicorn

from services.gateway.protocol import limited
from services.gateway.service import Gateway

log = logging.getLogger(__name__)


def server(gateway: Gateway) -> uvicorn.Server:
    """A server for this gateway; ``serve()`` runs until SIGTERM or ``should_exit``."""
    settings = gateway.settings
    return uvicorn.Server(
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
            timeout_graceful_shutdown=max(1, int(settings.shutdown_grace)),
            backlog=2048,
        )
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
