"""POST /v1/load_lora_adapter, POST /v1/unload_lora_adapter, DELETE /v1/models/{id}."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from services.gateway.access import demand_admin
from services.gateway.errors import ApiError
from services.gateway.routes import body_of, caller, json

if TYPE_CHECKING:
    from services.gateway.service import Gateway


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of load_lora_adapter; ``base_model`` where several are served."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    base_model: str | None = None


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of unload_lora_adapter."""

    lora_name: str = ""
    lora_int_id: Any = None  # vLLM's; names are enough here


_load = msgspec.json.Decoder(LoadRequest)
_unload = msgspec.json.Decoder(UnloadRequest)


def add(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        demand_admin(caller(request))
        asked = await body_of(request, gateway, _load)
        if not asked.lora_name or not asked.lora_path:
            raise _missing("Both 'lora_name' and 'lora_path' must be provided.")
        await gateway.adapters.load(
            asked.lora_name, asked.lora_path, asked.base_model, asked.load_inplace
        )
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        demand_admin(caller(request))
        asked = await body_of(request, gateway, _unload)
        if not asked.lora_name:
            raise _missing("'lora_name' needs to be provided to unload a LoRA adapter.")
        await gateway.adapters.unload(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    @app.delete("/v1/models/{name:path}")
    async def delete(request: Request, name: str) -> Response:
        await gateway.adapters.delete(name, caller(request))
        return json({"id": name, "object": "model", "deleted": True})


def _missing(message: str) -> ApiError:
    return ApiError(400, message, type="InvalidUserInput")
