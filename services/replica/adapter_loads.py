"""Adapters of one replica: all current versions before it serves, the others when asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.replica.control_block import ControlBlock
from services.replica.engines.base import AdapterError, Engine, Rejected
from shared import data_homes
from shared.adapter_files import BadName
from shared.adapters import AdapterRegistry, AdapterVersion, Unknown
from shared.messages import DeleteData, Generate, LoadAdapter, StoreData, UnloadAdapter
from shared.redis_client import TRANSIENT

log = logging.getLogger(__name__)


class AdapterLoads:
    """Brings adapter versions from disk into an engine. Called between steps only."""

    def __init__(
        self, replica: str, engine: Engine, registry: AdapterRegistry, block: ControlBlock
    ) -> None:
        self._replica, self._engine = replica, engine
        self._registry, self._block = registry, block
        self._shadow: Callable[[], None] | None = None

    def watch(self, shadow: Callable[[], None] | None) -> None:
        """``shadow`` takes over what training has published; called at every turn."""
        self._shadow = shadow

    def take_published(self) -> None:
        """Serve a version that training published since the last turn."""
        if self._shadow is None:
            return
        try:
            self._shadow()
        except AdapterError as e:
            log.error("%s: a version that training published is refused: %s", self._replica, e)

    async def load_all(self) -> None:
        """Load the current version of every adapter of this base.

        A bad adapter keeps no good one from being served.
        """
        found = await self._registry.current_of_base(self._engine.card.name)
        for name, entry in found.items():
            try:
                await self._load(name, entry.version, entry.path, current=True)
            except AdapterError as e:
                log.error("%s: adapter %s is not served: %s", self._replica, name, e)

    async def ready(self, request: Generate) -> None:
        """Make the request's adapter version resident. Raises Rejected when it cannot be."""
        name, version = request.adapter, request.adapter_version
        if name is None or self._engine.has_adapter(name, version):
            return
        try:
            entry = await self._find(name, version)
            if not self._engine.has_adapter(name, entry.version) or version is None:
                await self._load(name, entry.version, entry.path, current=version is None)
        except (Unknown, BadName) as e:
            raise Rejected(
                f"adapter {name!r} cannot be served: {e}",
                status=404,
                code="model_not_found",
                param="model",
            ) from e
        except AdapterError as e:
            raise Rejected(f"adapter {name!r} cannot be served: {e}", param="model") from e
        except TRANSIENT as e:
            raise Rejected(
                f"adapter {name!r} is not resident and Redis does not answer: {e}", status=503
            ) from e

    async def _find(self, name: str, version: str | None) -> AdapterVersion:
        adapter = await self._registry.get(name)
        if adapter is None or adapter.base != self._engine.card.name:
            raise Unknown(f"no adapter {name!r} of {self._engine.card.name!r} is registered")
        if version is not None:
            return await self._registry.version(name, version)
        entry = await self._registry.current(name)
        if entry is None:
            raise Unknown(f"adapter {name!r} has no version yet")
        return entry

    async def obey(self, command: LoadAdapter | UnloadAdapter) -> dict[str, str]:
        """Carry out a command; returns the fields of the event that tells how it went."""
        answer = {
            "kind": "adapter_loaded",
            "replica": self._replica,
            "adapter": command.name,
            "reply_to": command.reply_to,
            "ok": "1",
            "why": "",
        }
        if isinstance(command, UnloadAdapter):
            was = self._engine.unload_adapter(command.name)
            return {**answer, "kind": "adapter_unloaded", "why": "" if was else "was not loaded"}
        answer["version"] = command.version
        try:
            await self._load(command.name, command.version, command.path, current=True)
        except (AdapterError, BadName) as e:
            log.error(
                "%s: adapter %s %s refused: %s", self._replica, command.name, command.version, e
            )
            return {**answer, "kind": "adapter_refused", "ok": "0", "why": str(e)}
        return answer

    async def count_data(self) -> None:
        """Write into the record how many training samples this replica holds."""
        await data_homes.refresh(self._registry.redis, self._registry.data_dir, self._replica)

    async def obey_data(self, command: StoreData | DeleteData) -> dict[str, str]:
        """Keep or delete a training file; returns the fields of the event that answers."""
        registry = self._registry
        return await data_homes.obey(registry.redis, registry.data_dir, self._replica, command)

    async def _load(self, name: str, version: str, path: str, *, current: bool) -> None:
        started = time.monotonic()
        self._block.step_started = started
        try:
            await asyncio.to_thread(self._engine.load_adapter, name, version, path, current=current)
        finally:
            self._block.step_started = 0.0
        log.info(
            "%s: adapter %s %s loaded in %.0f ms",
            self._replica,
            name,
            version,
            (time.monotonic() - started) * 1e3,
        )
