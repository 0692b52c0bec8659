"""uvicorn as the gateway runs it: uvloop, httptools, no access log (it would be slow, and
paths and queries are nobody's business)."""

from __future__ import annotations

import uvicorn

from services.gateway.service import Gateway


def server(gateway: Gateway) -> uvicorn.Server:
    """A server for this gateway; ``serve()`` runs until SIGTERM or ``should_exit``."""
    settings = gateway.settings
    return uvicorn.Server(
        uvicorn.Config(
            gateway.asgi,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http="httptools",
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
