"""uvicorn as the gateway runs it: uvloop, httptools, no access log (it would be slow, and
paths and queries are nobody's business)."""

from __future__ import annotations

import ipaddress
import logging

import uvicorn

from services.gateway.protocol import limited
from services.gateway.service import Gateway

log = logging.getLogger(__name__)


def server(gateway: Gateway) -> uvicorn.Server:
    """A server for this gateway; ``serve()`` runs until SIGTERM or ``should_exit``."""
    settings = gateway.settings
    host = settings.host
    if gateway.access.open and not _loopback(host) and not settings.allow_open:
        log.warning(
            "no keys file (COLLM_API_KEYS_FILE): listening on loopback only instead of %s; "
            "make keys with 'collm keys create', or set allow_open where others are kept out",
            host,
        )
        host = "127.0.0.1"
    return uvicorn.Server(
        uvicorn.Config(
            gateway.asgi,
            host=host,
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


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
