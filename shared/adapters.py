"""The adapter registry: which adapters exist, their versions, which one is current.

In Redis a hash ``adapter:<name>``, a hash of its versions, and the set of all names; the tensors
lie on disk (``shared.adapter_files``). Every change is one Lua script (``shared.adapter_scripts``)
that also writes to ``events``; publishing a version twice changes nothing, so that a restarted
coordinator cannot aggregate twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
from redis.asyncio import Redis

from shared import adapter_files, names
from shared.adapter_scripts import FORGET, MAKE_CURRENT, PUBLISH, REGISTER, SET_FIELD
from shared.replica_state import EVENTS_MAXLEN


class AdapterVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an adapter."""

    version: str
    path: str  # PEFT folder
    quality: float = 1.0  # Q; starts at 1
    parent: str = ""  # version it was trained from
    round: int = 0
    step: int = 0
    session: str = ""
    heldout_ce: float | None = None  # nats per token
    loss: float | None = None  # of the training that made it, nats per token
    promoted: bool = True  # False: kept and marked, but never made current by its publisher
    note: str = ""  # why it was not promoted, or what it is
    created: float = 0.0  # Redis seconds


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as ``redis-cli HGETALL collm:adapter:<name>`` shows it."""

    name: str
    base: str  # served name of the base model
    rank: int
    lora_alpha: float = 0.0
    tenant: str = ""  # "" = everybody's
    source: str = ""  # "load" | "job" | "session" | "data"
    created: float = 0.0
    current: str = ""  # version given to new requests; "" = none yet
    quality: float = 1.0  # of the current version
    training: dict[str, str | int | float] = {}  # how it is trained where not by default
    trained: dict[str, int] = {}  # replica -> samples that its past sessions have seen

    @classmethod
    def from_hash(cls, raw: Mapping[bytes, bytes]) -> Adapter:
        """Raises msgspec.ValidationError or orjson.JSONDecodeError on a damaged record."""
        values: dict[str, Any] = {k.decode(): v.decode() for k, v in raw.items()}
        for field in ("training", "trained"):
            if field in values:
                values[field] = orjson.loads(values[field])
        return msgspec.convert(values, cls, strict=False)


class Conflict(RuntimeError):
    """The registry holds something else than the change expects; says what."""


class Unknown(KeyError):
    """No adapter or version of that name."""

    def __str__(self) -> str:
        return str(self.args[0])


class AdapterRegistry:
    """Reads and changes the registry; one object a process. Disk work runs in a thread."""

    def __init__(self, redis: Redis, data_dir: Path) -> None:
        self._redis = self.redis = redis
        self.data_dir = data_dir

    def folder(self, name: str, version: str) -> Path:
        """Where a version's files lie. Raises adapter_files.BadName."""
        return adapter_files.folder(self.data_dir, name, version)

    async def register(
        self,
        name: str,
        *,
        base: str,
        rank: int,
        lora_alpha: float = 0.0,
        tenant: str = "",
        source: str = "",
    ) -> bool:
        """Make the adapter known; False if it was, with the same base and tenant.

        Raises Conflict when the name belongs to another base or tenant, adapter_files.BadName.
        """
        fields = {
            "name": adapter_files.check_name(name),
            "base": base,
            "rank": str(rank),
            "lora_alpha": str(lora_alpha),
            "tenant": tenant,
            "source": source,
            "quality": "1.0",
        }
        flat = [item for pair in fields.items() for item in pair]
        made, found_base, found_tenant = await self._run(REGISTER, name, *flat)
        if made == 0 and found_tenant.decode() != tenant:
            raise Conflict(f"adapter {name!r} exists and belongs to another tenant")
        if made == 0 and found_base.decode() != base:
            raise Conflict(f"adapter {name!r} exists for base model {found_base.decode()!r}")
        return bool(made)

    async def publish(
        self,
        name: str,
        entry: AdapterVersion,
        *,
        promote: bool = True,
        expected: str | None = None,
        why: str = "",
    ) -> bool:
        """Add a version and (unless ``promote`` is False) make it current, in one step.

        False when that version exists already: nothing is changed. ``expected`` names the
        version that must be current ("" = none). Raises Unknown, Conflict, BadName.
        """
        adapter_files.check_name(entry.version)
        if entry.created == 0.0:
            seconds, micros = await self._redis.time()
            entry = msgspec.structs.replace(entry, created=seconds + micros / 1e6)
        entry = msgspec.structs.replace(entry, promoted=promote)
        done, current = await self._run(
            PUBLISH,
            name,
            entry.version,
            msgspec.json.encode(entry),
            "1" if promote else "0",
            "*" if expected is None else expected,
            str(entry.quality),
            why or entry.note,
        )
        if done == -2:
            raise Unknown(f"no adapter {name!r} is registered")
        if done == -1:
            raise Conflict(
                f"adapter {name!r}: version {expected or 'none'!r} was expected to be current, "
                f"{current.decode() or 'none'!r} is"
            )
        return bool(done)

    async def rollback(self, name: str, to: str | None = None, *, why: str = "") -> AdapterVersion:
        """Make ``to`` (default: the current version's parent) current; its quality comes back.

        Raises Unknown; Conflict when the current version has no parent.
        """
        if to is None:
            current = await self.current(name)
            if current is None or not current.parent:
                raise Conflict(f"adapter {name!r} has no earlier version to go back to")
            to = current.parent
        entry = await self.version(name, to)
        if not await self._run(MAKE_CURRENT, name, to, str(entry.quality), why):
            raise Unknown(f"adapter {name!r} has no version {to!r}")
        return entry

    async def get(self, name: str) -> Adapter | None:
        raw = await self._redis.hgetall(names.adapter(name))
        return Adapter.from_hash(raw) if raw else None

    async def set_training(self, name: str, options: dict[str, str | int | float]) -> None:
        """How sessions train this adapter (see services.coordinator.settings.TrainingOptions).

        Raises Unknown.
        """
        await self._set(name, "training", orjson.dumps(options))

    async def set_trained(self, name: str, samples: dict[str, int]) -> None:
        """What sessions have learnt from: replica -> samples; more than that is fresh data."""
        await self._set(name, "trained", orjson.dumps(samples))

    async def _set(self, name: str, field: str, value: bytes) -> None:
        if not await self._redis.eval(SET_FIELD, 1, names.adapter(name), field, value):
            raise Unknown(f"no adapter {name!r} is registered")

    async def all(self, *, tenant: str | None = None, base: str | None = None) -> list[Adapter]:
        """All adapters by name; ``tenant`` keeps that tenant's own and everybody's."""
        found = []
        for raw in sorted(await self._redis.smembers(names.ADAPTERS)):
            adapter = await self.get(raw.decode())
            if adapter is None or (base is not None and adapter.base != base):
                continue
            if tenant is None or adapter.tenant in ("", tenant):
                found.append(adapter)
        return found

    async def version(self, name: str, version: str) -> AdapterVersion:
        """One version's entry. Raises Unknown."""
        raw = await self._redis.hget(names.adapter_versions(name), version)
        if raw is None:
            raise Unknown(f"adapter {name!r} has no version {version!r}")
        return msgspec.json.decode(raw, type=AdapterVersion)

    async def versions(self, name: str) -> list[AdapterVersion]:
        """All versions, oldest first."""
        raw = await self._redis.hvals(names.adapter_versions(name))
        entries = [msgspec.json.decode(item, type=AdapterVersion) for item in raw]
        return sorted(entries, key=lambda e: (e.created, e.round, e.step, e.version))

    async def current(self, name: str) -> AdapterVersion | None:
        """The version new requests get; None: no adapter or no version yet."""
        raw = await self._redis.hget(names.adapter(name), "current")
        return await self.version(name, raw.decode()) if raw else None

    async def current_of_base(self, base: str) -> dict[str, AdapterVersion]:
        """What a replica of ``base`` loads before it serves: name -> current version."""
        found = {}
        for adapter in await self.all(base=base):
            entry = await self.current(adapter.name)
            if entry is not None:
                found[adapter.name] = entry
        return found

    async def forget(self, name: str, *, why: str = "") -> bool:
        """Remove an adapter, its versions and its files; False: there was none."""
        found = await self._run(FORGET, name, "", why)
        await asyncio.to_thread(adapter_files.remove, self.data_dir, name)
        return bool(found)

    async def forget_version(self, name: str, version: str, *, why: str = "") -> bool:
        """Remove one version and its files. Raises Conflict for the current one."""
        found = await self._run(FORGET, name, version, why)
        if found == -1:
            raise Conflict(f"version {version!r} of adapter {name!r} is current: it stays")
        await asyncio.to_thread(adapter_files.remove, self.data_dir, name, version)
        return bool(found)

    async def prune(self, name: str, keep: int, in_use: frozenset[str] = frozenset()) -> list[str]:
        """Retention: forget all but the newest ``keep`` versions; returns the forgotten.

        The current version, its parent, the first one, those ``in_use`` stay in any case.
        """
        entries, current = await self.versions(name), await self.current(name)
        if current is None:
            return []
        every = [e.version for e in entries]
        stay = {current.version, current.parent, *in_use, *every[:1], *every[-keep:]}
        gone = [version for version in every if version not in stay]
        for version in gone:
            await self.forget_version(name, version, why=f"retention: {keep} versions are kept")
        return gone

    async def _run(self, script: str, name: str, *args: str | bytes) -> Any:
        keys = (names.adapter(name), names.adapter_versions(name), names.EVENTS, names.ADAPTERS)
        return await self._redis.eval(
            script, len(keys), *keys, str(EVENTS_MAXLEN), adapter_files.check_name(name), *args
        )


async def replicas_serving(redis: Redis, name: str) -> dict[str, str]:
    """Replica id -> version of adapter ``name`` in its record (what it gives new requests)."""
    found = {}
    for raw in sorted(await redis.smembers(names.REPLICAS)):
        adapters = await redis.hget(names.replica(raw.decode()), "adapters")
        held = orjson.loads(adapters) if adapters else {}
        if name in held:
            found[raw.decode()] = str(held[name])
    return found
