"""Adapters at run time: vLLM's load and unload routes, and DELETE /v1/models/{id}.

An adapter is validated by loading: every live replica of its base model takes it before it is
registered and listed, and one that no replica can serve never is. Its files are copied, so that
what happens later in the folder it came from changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.gateway.access import Principal
from services.gateway.catalogue import visible
from services.gateway.errors import ApiError, model_not_found, unavailable
from shared import adapter_files, data_homes, names
from shared.adapter_files import CONFIG_FILE, TENSOR_FILE, BadFolder, BadName, BadPath, PeftCard
from shared.adapters import Adapter, AdapterRegistry, AdapterVersion, Conflict
from shared.control import send_command
from shared.messages import LoadAdapter, UnloadAdapter
from shared.tail import just_before

if TYPE_CHECKING:
    from services.gateway.service import Gateway

LARGEST = 2 << 30  # bytes of an adapter's tensors


class Adapters:
    """Loads and removes; one change of a name at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        settings = gateway.settings
        self.registry = AdapterRegistry(gateway.redis, settings.data_dir)
        self._root = settings.adapter_root or settings.data_dir / "adapters"
        self._locks: dict[str, asyncio.Lock] = {}

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    # ------------------------------------------------------------ load

    async def load(self, name: str, path: str, base: str | None, inplace: bool) -> None:
        """Raises ApiError with vLLM's types."""
        try:
            adapter_files.check_name(name)
        except BadName as e:
            raise _bad_input(str(e), "lora_name") from None
        async with self._lock(name):
            known = await self.registry.get(name)
            if known is not None and not inplace:
                raise _bad_input(f"The lora adapter '{name}' has already been loaded.", "lora_name")
            if name in self._gateway.catalogue.now.models:
                raise _bad_input(f"'{name}' is the name of a base model", "lora_name")
            folder, card = await asyncio.to_thread(self._read, path)
            base = self._base(base, card, known)
            version, place = await self._copy(name, folder)
            await self._everywhere(name, version, place, base, known)
            await self._register(name, version, place, base, card)

    def _read(self, path: str) -> tuple[Path, PeftCard]:
        try:
            folder = adapter_files.confined(self._root, path)
            for file in (CONFIG_FILE, TENSOR_FILE):
                adapter_files.confined(self._root, folder / file)
            card = adapter_files.read_card(folder)
            size = (folder / TENSOR_FILE).stat().st_size
            adapter_files.check_tensors(folder)
        except (BadPath, ValueError) as e:
            if isinstance(e, BadFolder):
                raise _not_found(f"No adapter found: {e}") from None
            raise _bad_input(str(e), "lora_path") from None
        except OSError as e:
            raise _not_found(f"No adapter found: {e.strerror or e}") from None
        if size > LARGEST:
            raise _bad_input(f"the adapter is larger than {LARGEST} bytes", "lora_path")
        return folder, card

    def _base(self, named: str | None, card: PeftCard, known: Adapter | None) -> str:
        models = self._gateway.catalogue.now.models
        if known is not None:
            named = named or known.base
            if named != known.base:
                raise _bad_input(f"it is registered for base model {known.base!r}", "base_model")
        if named is not None:
            if named not in models:
                raise _not_found(f"no base model {named!r} is served")
            return named
        if len(models) == 1:
            return next(iter(models))
        fits = [
            m for m, served in models.items() if Path(card.base).name in (m, served.folder.name)
        ]
        if len(fits) != 1:
            raise _bad_input("several base models are served: name one", "base_model")
        return fits[0]

    async def _copy(self, name: str, folder: Path) -> tuple[str, Path]:
        """Its version is a hash of its contents: loading the same again changes nothing."""

        def work() -> tuple[str, Path]:
            digest = hashlib.sha256()
            for file in (CONFIG_FILE, TENSOR_FILE):
                with open(folder / file, "rb") as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
            version = f"load-{digest.hexdigest()[:16]}"
            data_dir = self.registry.data_dir
            with adapter_files.staged(data_dir, name, version) as place:
                for file in (CONFIG_FILE, TENSOR_FILE):
                    shutil.copyfile(folder / file, place / file)
            return version, adapter_files.folder(data_dir, name, version).resolve()

        return await asyncio.to_thread(work)

    async def _everywhere(
        self, name: str, version: str, place: Path, base: str, known: Adapter | None
    ) -> None:
        """Every live replica of the base loads it; one that refuses takes it back from all."""
        replicas = sorted(self._gateway.catalogue.now.replicas.get(base, {}))
        if not replicas:
            raise unavailable(f"no replica of model {base!r} is alive", 5.0)
        ticket = secrets.token_hex(8)
        command = {
            r: LoadAdapter(name=name, version=version, path=str(place), reply_to=f"{ticket}-{r}")
            for r in replicas
        }
        answers = await self._send(command)
        refused = {r: a["why"] for r, a in answers.items() if a.get("ok") != "1"}
        silent = [r for r in replicas if r not in answers]
        if not refused and not silent:
            return
        if known is None:
            await self._send({r: UnloadAdapter(name=name, reply_to="") for r in replicas})
            await self.registry.forget(name)
        why = "; ".join(f"{r}: {w}" for r, w in sorted(refused.items()))
        if refused:
            raise ApiError(400, f"the adapter cannot be served: {why}", type="BadRequestError")
        raise ApiError(
            500,
            f"not loaded: {', '.join(silent)} did not answer in time",
            type="InternalServerError",
        )

    async def _send(
        self, commands: Mapping[str, LoadAdapter | UnloadAdapter]
    ) -> dict[str, dict[str, str]]:
        """Replica -> the event that answered it."""
        redis = self._gateway.redis
        since = await just_before(redis)
        for replica, order in commands.items():
            await send_command(redis, names.control(replica), order)
        tickets = {c.reply_to: replica for replica, c in commands.items() if c.reply_to}
        if not tickets:
            return {}
        wait = self._gateway.settings.adapter_wait
        found = await data_homes.answers(redis, list(tickets), since, wait)
        return {tickets[ticket]: fields for ticket, fields in found.items()}

    async def _register(
        self, name: str, version: str, place: Path, base: str, card: PeftCard
    ) -> None:
        try:
            await self.registry.register(
                name, base=base, rank=card.rank, lora_alpha=card.lora_alpha, source="load"
            )
            entry = AdapterVersion(version=version, path=str(place), note="loaded over HTTP")
            if not await self.registry.publish(name, entry):
                await self.registry.rollback(name, version, why="loaded again over HTTP")
        except Conflict as e:
            raise _bad_input(str(e), "lora_name") from None
        await self._gateway.catalogue.refresh()

    # ------------------------------------------------------------ remove

    async def unload(self, name: str) -> None:
        """Raises ApiError 404 in vLLM's words."""
        if not await self._remove(name, None):
            raise _not_found(f"The lora adapter '{name}' cannot be found.")

    async def delete(self, name: str, caller: Principal) -> None:
        """DELETE /v1/models/{id} by its owner or an admin. Raises ApiError."""
        if name in self._gateway.catalogue.now.models:
            raise ApiError(400, "base models cannot be deleted", param="model")
        if not await self._remove(name, caller):
            raise model_not_found(name)

    async def _remove(self, name: str, caller: Principal | None) -> bool:
        """New requests find it no longer; running ones finish on the replicas."""
        async with self._lock(name):
            try:
                known = await self.registry.get(adapter_files.check_name(name))
            except BadName:
                return False
            if known is None or not (caller is None or visible(known, caller.sees)):
                return False
            if caller is not None and not caller.admin and known.tenant != caller.tenant:
                raise ApiError(403, "it belongs to everybody", type="permission_error")
            ticket = secrets.token_hex(8)
            replicas = sorted(self._gateway.catalogue.now.replicas.get(known.base, {}))
            await self.registry.forget(name, why="removed over HTTP")
            await self._gateway.catalogue.refresh()
            await self._send(
                {r: UnloadAdapter(name=name, reply_to=f"{ticket}-{r}") for r in replicas}
            )
            for replica in replicas:
                await data_homes.send_delete(self._gateway.redis, replica, name)
            own = self._gateway.settings.tenants.get(known.tenant)
            if own is not None and own.feedback_adapter == name:
                await self._gateway.storage.forget_examples(known.tenant)
        self._locks.pop(name, None)
        return True


def _bad_input(message: str, param: str) -> ApiError:
    return ApiError(400, message, type="InvalidUserInput", param=param)


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, type="NotFoundError")
