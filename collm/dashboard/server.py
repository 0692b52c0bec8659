"""The dashboard's process: the page, /health, and the readers behind them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from nicegui import ui
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)

from collm.dashboard.history import History
from collm.dashboard.page import Page
from collm.dashboard.reader import GatewayReader, Reader
from collm.dashboard.settings import DashboardSettings
from shared.redis_client import connect

log = logging.getLogger(__name__)

TITLE = "CoLLM"
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="3" fill="#3b82c4"/>'
    '<path d="M3 11V8m4 3V4m4 7V6" stroke="#fff" stroke-width="2" stroke-linecap="round"/></svg>'
)


def application(settings: DashboardSettings) -> FastAPI:
    """The ASGI application; its lifespan runs the readers. One a process: NiceGUI is global."""
    history = History(settings.history)
    redis = connect(settings.redis_url, max_connections=4)
    reader = Reader(redis, history, settings.interval)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    gateways = GatewayReader(settings.gateways, history, reader.clock, settings.interval)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(r.run()) for r in (reader, gateways)]
        for task in tasks:
            task.add_done_callback(_tell_end)
        app.state.tasks = tasks
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await redis.aclose()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health/live")
    async def live() -> JSONResponse:
        """503 once a reader has ended: the page would stand still."""
        dead = [t for t in app.state.tasks if t.done() and t.exception() is not None]
        status = {"status": "red", "reason": "a reader has ended"} if dead else {"status": "ok"}
        return JSONResponse(status, 503 if dead else 200)

    @app.get("/health/ready")
    @app.get("/health")
    async def ready() -> JSONResponse:
        """503 while Redis gives no answer."""
        if history.away is not None:
            return JSONResponse({"status": "red", "reason": history.away}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """This process's own memory, processor time and descriptors; none of the cluster's."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @ui.page("/", title=TITLE)
    def index() -> None:
        Page(history, reader.clock)

    ui.run_with(
        app, title=TITLE, favicon=FAVICON, dark=None, show_welcome_message=False, tailwind=False
    )
    return app


async def serve(settings: DashboardSettings, ready: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT. ``ready`` gets the page's address. Raises OSError (port taken)."""
    config = uvicorn.Config(
        application(settings),
        log_config=None,
        log_level="warning",  # a line a tab says nothing
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    listener = socket.create_server((settings.host, settings.port))
    host, port = listener.getsockname()[:2]
    ready(f"http://{host}:{port}")
    # uvicorn stops on these signals and raises them once more when it is done, for handlers that
    # were there before; without any the process would end by the signal instead of with 0.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, log.debug, "stopping")
    await uvicorn.Server(config).serve(sockets=[listener])


def _tell_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a reader of the dashboard ended", exc_info=error)
