"""The FastAPI application: models, health, metrics, and errors in OpenAI's shape."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from services.gateway import (
    errors,
    feedback,
    file_routes,
    job_routes,
    lora_routes,
    openapi,
    text_routes,
)
from services.gateway.catalogue import ServedModel, visible
from services.gateway.errors import ApiError
from services.gateway.front import crash
from services.gateway.routes import caller, json, respond
from shared.adapters import Adapter

if TYPE_CHECKING:
    from services.gateway.service import Gateway


def build(gateway: Gateway) -> FastAPI:
    """All routes but the busy ones (see ``front``)."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = _application(lifespan)
    _errors(app)
    _health(app, gateway)
    _models(app, gateway)
    text_routes.add(app, gateway, project_version())
    lora_routes.add(app, gateway)
    file_routes.add(app, gateway)
    job_routes.add(app, gateway)
    feedback.add(app, gateway)
    described = openapi.description(project_version())
    app.openapi = lambda: described  # type: ignore[method-assign]
    return app


def _application(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    return FastAPI(
        title="CoLLM",
        version=project_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )


def project_version() -> str:
    try:
        return version("collm")
    except PackageNotFoundError:  # run from the tree itself, as in the images
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(p) for p in first["loc"] if p not in ("body", "query", "path"))
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
        return respond(ApiError(400, message, param=param or None, code="invalid_value"))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"no such route: {request.method} {request.url.path}"
        elif error.status_code == 405:
            message = f"method {request.method} is not allowed on {request.url.path}"
        answer = respond(ApiError(error.status_code, message))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        return respond(crash())  # the server logs the fault itself


def _health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 when Redis and at least one replica answer, else 503; both with the details."""
        status = gateway.health()
        return json(status, 200 if status["status"] == "ok" else 503)

    @app.get("/health/live")
    async def live() -> Response:
        """200 as long as this process turns its event loop."""
        return json({"status": "ok"}, 200)

    @app.get("/health/ready")
    async def ready() -> Response:
        """Whether to send requests here: like /health, and red while shutting down."""
        status = gateway.health()
        good = status["status"] == "ok" and not gateway.stopping
        return json(status, 200 if good else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        await gateway.look_at_streams()
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _models(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """Base models, and the adapters that the caller may use."""
        now, sees = gateway.catalogue.now, caller(request).sees
        cards = [model_card(m) for _, m in sorted(now.models.items())]
        cards += [
            adapter_card(a, now.models.get(a.base))
            for _, a in sorted(now.adapters.items())
            if visible(a, sees)
        ]
        return json({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        target = await gateway.catalogue.look_up(name, caller(request).sees)
        if target is None:
            raise errors.model_not_found(name)
        if target.adapter is not None:
            return json(adapter_card(target.adapter, target.model))
        return json(model_card(target.model))


def model_card(model: ServedModel) -> dict[str, Any]:
    """A base model as OpenAI and vLLM show it; ``emulated`` says that nothing is computed."""
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": int(card.created),
        "owned_by": "collm",
        "root": card.path,
        "parent": None,
        "max_model_len": card.context,
        "permission": [],
        "emulated": card.emulated,
    }


def adapter_card(adapter: Adapter, base: ServedModel | None) -> dict[str, Any]:
    """An adapter: ``parent`` is its base model, ``root`` and ``version`` what answers now."""
    return {
        "id": adapter.name,
        "object": "model",
        "created": int(adapter.created),
        "owned_by": adapter.tenant or "collm",
        "root": f"{adapter.name}/{adapter.current}",
        "parent": adapter.base,
        "max_model_len": None if base is None else base.card.context,
        "permission": [],
        "version": adapter.current,
        "quality": adapter.quality,
        "emulated": base is not None and base.card.emulated,
    }
