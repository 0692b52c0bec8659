"""``--lora-modules``: adapters from PEFT folders, loaded through the gateway once it answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from collm.up.claims import address
from collm.up.errors import UpError
from collm.where import api_key
from services.gateway.settings import GatewaySettings

Tell = Callable[[str], None]
LOAD_SECONDS = 120.0


def check(modules: Mapping[str, str]) -> None:
    """Whether each folder looks like an adapter. Raises UpError before anything starts."""
    for name, path in modules.items():
        if not (Path(path).expanduser() / "adapter_config.json").is_file():
            raise UpError(f"--lora-modules {name}={path}: no adapter_config.json in that folder")


def admin_url(settings: GatewaySettings) -> str | None:
    """Where the gateway's admin routes answer; None: with all others."""
    if settings.admin_port is None:
        return None
    return address(settings.admin_host, settings.admin_port)


async def load(url: str, modules: Mapping[str, str], data: Path, tell: Tell) -> None:
    """Copy each folder to where the gateway may read it and have it loaded.

    ``url`` is that of the admin routes. Raises UpError.
    """
    headers = {"authorization": f"Bearer {api_key()}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=LOAD_SECONDS, trust_env=False
    ) as client:
        for name, path in modules.items():
            folder = data / "adapters" / ".imports" / name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(Path(path).expanduser(), folder)
            body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
            try:
                reply = await client.post("/v1/load_lora_adapter", json=body)
            except httpx.TransportError as e:
                raise UpError(f"adapter {name!r}: {url} is not reached: {e}") from e
            if reply.status_code != 200:
                raise UpError(f"adapter {name!r} ({path}) was not loaded: {reply.text[:300]}")
            tell(f"adapter {name} is loaded from {path}")
