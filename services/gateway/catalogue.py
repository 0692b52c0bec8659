"""What is served: base models from their cards, adapters from the registry, live replicas.

A cache that is refreshed every second and when a name is not found, so that a model or
adapter exists here the moment somebody asks for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from services.gateway.settings import ModelSettings
from services.gateway.text import Vocabulary
from shared import chat, names
from shared.adapters import Adapter
from shared.memory import give_back
from shared.records import ModelCard
from shared.redis_client import TRANSIENT
from shared.replica_state import ANSWERING

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
LEAST_SECONDS_BETWEEN_MISSES = 0.2  # unknown names must not make Redis busy


_PROBE = [{"role": "user", "content": "?"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A base model that can be asked. One object for as long as its card stays the same."""

    card: ModelCard
    folder: Path
    tokenizer: chat.ChatTokenizer
    vocabulary: Vocabulary
    settings: ModelSettings
    knows_tools: bool = False  # its chat template shows tools to the model

    @property
    def name(self) -> str:
        return self.card.name


class Target(msgspec.Struct, frozen=True):
    """What a request's ``model`` means."""

    model: ServedModel
    adapter: Adapter | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known at one moment."""

    models: Mapping[str, ServedModel] = {}
    unusable: Mapping[str, str] = {}  # model -> why this gateway cannot serve it
    adapters: Mapping[str, Adapter] = {}
    replicas: Mapping[str, Mapping[str, str]] = {}  # model -> replica -> state, live ones only
    trainers: frozenset[str] = frozenset()  # replicas with training switched on
    answering: frozenset[str] = frozenset()  # models with a replica that can answer
    released: Mapping[str, float] = {}  # model -> requests a second that leave its queue, of late

    def homes(self, model: str) -> list[str]:
        """Live replicas that may keep training data: those that train, or all if none does."""
        live = sorted(self.replicas.get(model, {}))
        return [replica for replica in live if replica in self.trainers] or live

    def alive(self, model: str) -> bool:
        """Whether a replica of the model can answer or will without anybody's doing."""
        return model in self.answering


class Catalogue:
    """The cache and its refreshing."""

    def __init__(self, redis: Redis, configured: Mapping[str, ModelSettings]) -> None:
        self._redis = redis
        self._configured = configured
        self._missed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self.now = Snapshot()

    async def run(self) -> None:
        """Refresh for ever. Redis being away leaves the last state."""
        while True:
            try:
                await self.refresh()
            except TRANSIENT as e:
                log.debug("the catalogue was not refreshed: %s", e)
            await asyncio.sleep(REFRESH_SECONDS)

    def find(self, name: str, tenant: str | None = None) -> Target | None:
        """By base model or adapter name, from memory; another tenant's adapter is not there.

        ``tenant`` None sees everything.
        """
        model = self.now.models.get(name)
        if model is not None:
            return Target(model)
        adapter = self.now.adapters.get(name)
        if adapter is None or not visible(adapter, tenant):
            return None
        base = self.now.models.get(adapter.base)
        return None if base is None else Target(base, adapter)

    async def look_up(self, name: str, tenant: str | None = None) -> Target | None:
        """``find``, with one refresh (at most a few a second) before it says None."""
        target = self.find(name, tenant)
        if target is not None:
            return target
        loop_time = asyncio.get_running_loop().time
        if loop_time() - self._missed_at >= LEAST_SECONDS_BETWEEN_MISSES:
            self._missed_at = loop_time()
            try:
                await self.refresh()
            except TRANSIENT as e:
                log.debug("the catalogue was not refreshed: %s", e)
        return self.find(name, tenant)

    async def refresh(self) -> None:
        """Read models, adapters and replicas anew."""
        async with self._refreshing:
            pipe = self._redis.pipeline(transaction=False)
            for key in (names.MODELS, names.ADAPTERS, names.REPLICAS):
                pipe.smembers(key)
            models, adapters, replicas = [
                sorted(m.decode() for m in s) for s in await pipe.execute()
            ]
            pipe = self._redis.pipeline(transaction=False)
            for name in models:
                pipe.hgetall(names.model(name))
            for name in adapters:
                pipe.hgetall(names.adapter(name))
            for name in replicas:
                pipe.hmget(names.replica(name), "model", "state", "trains")
                pipe.exists(names.replica_alive(name))
            for name in models:
                pipe.hget(names.demand(name), "released")
            found = iter(await pipe.execute() if models or adapters or replicas else ())
            served, unusable = await self._models(list(islice(found, len(models))))
            known = _adapters(list(islice(found, len(adapters))))
            records = list(islice(found, 2 * len(replicas)))
            live = _replicas(replicas, records)
            self.now = Snapshot(
                models=served,
                unusable=unusable,
                adapters=known,
                replicas=live,
                trainers=frozenset(
                    r for r, (*_, on) in zip(replicas, records[::2], strict=True) if on != b"false"
                ),
                answering=frozenset(m for m, r in live.items() if ANSWERING & set(r.values())),
                released={m: float(raw or 0) for m, raw in zip(models, found, strict=True)},
            )

    async def _models(
        self, hashes: list[dict[bytes, bytes]]
    ) -> tuple[dict[str, ServedModel], dict[str, str]]:
        served: dict[str, ServedModel] = {}
        unusable: dict[str, str] = {}
        for raw in hashes:
            if not raw:
                continue  # its key has expired or been removed
            try:
                card = ModelCard.from_hash(raw)
            except (msgspec.ValidationError, UnicodeDecodeError) as e:
                log.error("a model card is damaged and ignored: %s", e)
                continue
            known = self.now.models.get(card.name)
            if known is not None and known.card == card:
                served[card.name] = known
                continue
            try:
                served[card.name] = await self._load(card)
            except chat.ChatError as e:
                unusable[card.name] = str(e)
                if self.now.unusable.get(card.name) != str(e):
                    log.error("model %s cannot be served here: %s", card.name, e)
        return served, unusable

    async def _load(self, card: ModelCard) -> ServedModel:
        settings = self._configured.get(card.name, ModelSettings())
        folder = settings.path or Path(card.path)
        known = self.now.models.get(card.name)
        if known is not None and known.folder == folder and known.card.created == card.created:
            return msgspec.structs.replace(known, card=card)
        tokenizer = await asyncio.to_thread(chat.load, folder)
        model = ServedModel(
            card=card,
            folder=folder,
            tokenizer=tokenizer,
            vocabulary=Vocabulary(tokenizer.tokenizer),
            settings=settings,
            knows_tools=_knows_tools(tokenizer),
        )
        give_back()  # what reading tokenizer.json took is as much as the tokenizer itself
        return model


def visible(adapter: Adapter, tenant: str | None) -> bool:
    """Whether a tenant may see an adapter: everybody's, or its own. None sees everything."""
    return tenant is None or adapter.tenant in ("", tenant)


def _adapters(hashes: list[dict[bytes, bytes]]) -> dict[str, Adapter]:
    found = {}
    for raw in hashes:
        if not raw:
            continue
        try:
            adapter = Adapter.from_hash(raw)
        except (msgspec.ValidationError, ValueError) as e:
            log.error("an adapter's record is damaged and ignored: %s", e)
            continue
        if adapter.current:  # one without a version cannot be served yet
            found[adapter.name] = adapter
    return found


def _replicas(ids: list[str], found: list[object]) -> dict[str, dict[str, str]]:
    """Model -> live replica -> state, from pairs (fields of its record, heartbeat exists)."""
    by_model: dict[str, dict[str, str]] = {}
    for replica, (fields, alive) in zip(
        ids, zip(found[::2], found[1::2], strict=True), strict=True
    ):
        assert isinstance(fields, list)
        model, state, _ = fields
        if alive and model is not None and state is not None:
            by_model.setdefault(model.decode(), {})[replica] = state.decode()
    return by_model


def _knows_tools(tokenizer: chat.ChatTokenizer) -> bool:
    """Whether rendering with a tool makes a difference."""
    try:
        plain = tokenizer.render(_PROBE, add_generation_prompt=True)
        return plain != tokenizer.render(_PROBE, add_generation_prompt=True, tools=[_PROBE_TOOL])
    except chat.ChatError:
        return False
