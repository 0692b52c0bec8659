"""Feeds a History from Redis and from the gateways. Reads only; waits out whoever is away."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx
import msgspec
import orjson
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm import cluster
from collm.dashboard.history import History, Snapshot
from shared import demand, names, sessions
from shared.adapters import Adapter, AdapterVersion
from shared.clock import Now, RedisClock
from shared.demand import ModelDemand
from shared.messages import BODY, DecodeError, StepSample, TrainSample, decode_any
from shared.records import ModelCard, ReplicaRecord
from shared.redis_client import TRANSIENT, Backoff
from shared.sessions import Session

log = logging.getLogger(__name__)

PAGE = 1000  # entries a read
PAGES = 20  # reads of a stream in one look; the rest comes with the next
ADAPTERS = 200  # adapters shown at most
ENDED = 8  # sessions shown after their end
DAMAGE = (
    msgspec.ValidationError,
    msgspec.DecodeError,
    orjson.JSONDecodeError,
    UnicodeDecodeError,
)
SLO_COUNTER = "collm_slo_requests"


Resolve = Callable[[str, int], Awaitable[list[str]]]
BY_NAME = "dns+"


async def _resolve(host: str, port: int) -> list[str]:
    """``address:port`` of everything behind a name. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    )


class Reader:
    """Looks at Redis every ``interval`` seconds."""

    def __init__(self, redis: Redis, history: History, interval: float = 1.0) -> None:
        self._redis, self._history, self._interval = redis, history, interval
        self.clock = RedisClock()
        self._cursors: dict[str, str] = {}
        self._looked_adapters = 0.0
        self._adapters: tuple[Adapter, ...] = ()
        self._versions: dict[str, tuple[AdapterVersion, ...]] = {}
        self._ended: set[str] = set()  # sessions whose last record was read

    async def run(self) -> None:
        """Until cancelled. What Redis answers with an error is told on the page like silence."""
        backoff = Backoff()
        while True:
            try:
                await self.look()
            except (*TRANSIENT, *DAMAGE, ResponseError) as e:
                if self._history.away is None:
                    log.warning("no look at Redis (%s: %s)", type(e).__name__, e)
                self._history.take_absence(f"{type(e).__name__}: {e}")
                await backoff.wait()
                continue
            backoff.reset()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Everything that is new, once."""
        await self.clock.synchronise(self._redis, probes=1)
        now = self.clock()
        for stream in (names.EVENTS, names.METRICS):
            await self._read(stream, now)
        self._history.take_snapshot(await self._snapshot(now))
        await self._read_ended()
        self._history.take_absence(None)

    async def _read(self, stream: str, now: float) -> None:
        since = f"{int((now - self._history.seconds) * 1000)}-0"
        for _ in range(PAGES):
            cursor = self._cursors.setdefault(stream, since)
            page = await self._redis.xrange(stream, min=f"({cursor}", count=PAGE)
            for raw, fields in page:
                self._cursors[stream] = raw.decode()
                if stream == names.EVENTS:
                    self._history.take_event(raw.decode(), _text(fields))
                else:
                    self._take_sample(raw.decode(), fields.get(BODY, b""))
            if len(page) < PAGE:
                return

    def _take_sample(self, entry_id: str, body: bytes) -> None:
        try:
            sample = decode_any(body)
        except DecodeError:
            self._history.damaged += 1  # told on the page; its proper reader reports it
            return
        if isinstance(sample, StepSample):
            self._history.take_step(entry_id, sample)
        elif isinstance(sample, TrainSample):
            self._history.take_training(sample)

    async def _snapshot(self, now: float) -> Snapshot:
        replicas = await cluster.replicas(self._redis)
        if now - self._looked_adapters > 5:
            await self._read_adapters()
            self._looked_adapters = now
        models = await self._models()
        said: dict[str, ModelDemand] = {}
        queued = {}
        for card in models:
            queued[card.name] = await self._redis.xlen(names.requests(card.name))
            found = await self._demand(card.name)
            if found is not None:
                said[card.name] = found
        return Snapshot(
            time=now,
            replicas=tuple(replicas),
            alive=await self._alive(replicas),
            models=models,
            queued=queued,
            demand=said,
            sessions=await self._sessions(),
            adapters=self._adapters,
            versions=self._versions,
        )

    async def _demand(self, model: str) -> ModelDemand | None:
        try:
            return await demand.read(self._redis, model)
        except DAMAGE:
            self._history.damaged += 1
            return None

    async def _alive(self, replicas: list[ReplicaRecord]) -> frozenset[str]:
        if not replicas:
            return frozenset()
        found = await self._redis.mget([names.replica_alive(r.id) for r in replicas])
        return frozenset(r.id for r, value in zip(replicas, found, strict=True) if value)

    async def _models(self) -> tuple[ModelCard, ...]:
        found = []
        for raw in sorted(await self._redis.smembers(names.MODELS)):
            try:
                card = await self._redis.hgetall(names.model(raw.decode()))
                if card:
                    found.append(ModelCard.from_hash(card))
            except DAMAGE:
                self._history.damaged += 1
        return tuple(found)

    async def _sessions(self) -> tuple[Session, ...]:
        ids = sorted(i.decode() for i in await self._redis.smembers(names.SESSIONS))
        records = [await self._record(session_id) for session_id in ids]
        return tuple(sorted((r for r in records if r is not None), key=lambda s: (s.created, s.id)))

    async def _read_adapters(self) -> None:
        found, versions = [], {}
        for raw in sorted(await self._redis.smembers(names.ADAPTERS))[:ADAPTERS]:
            name = raw.decode()
            try:
                fields = await self._redis.hgetall(names.adapter(name))
                if not fields:
                    continue
                found.append(Adapter.from_hash(fields))
                entries = await self._redis.hvals(names.adapter_versions(name))
                known = [msgspec.json.decode(e, type=AdapterVersion) for e in entries]
            except DAMAGE:
                self._history.damaged += 1
                continue
            versions[name] = tuple(sorted(known, key=lambda v: (v.created, v.round, v.version)))
        self._adapters, self._versions = tuple(found), versions

    async def _read_ended(self) -> None:
        """The last record of sessions that ended lately, also before this process started."""
        ids = [e.fields.get("session", "") for e in self._history.events if _ends(e.kind)]
        for session_id in ids[-ENDED:]:
            if session_id in self._ended:
                continue
            record = await self._record(session_id)
            if record is not None:
                self._history.sessions[session_id] = record
            self._ended.add(session_id)
        self._ended &= set(ids)

    async def _record(self, session_id: str) -> Session | None:
        try:
            return await sessions.read(self._redis, session_id)
        except DAMAGE:
            self._history.damaged += 1
            return None


class GatewayReader:
    """Reads the gateways' counters of requests that met their limits.

    An address ``dns+http://name:port`` stands for every address that the name resolves to at that
    moment (a headless service): asked through one address, several gateways would answer in turn,
    and their counters would be taken for one that jumps.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        history: History,
        clock: Now,
        interval: float = 1.0,
        resolve: Resolve = _resolve,
    ) -> None:
        self._addresses, self._history, self._interval = addresses, history, interval
        self._clock, self._resolve = clock, resolve
        history.gateways = dict.fromkeys(addresses, "not asked yet")

    async def run(self) -> None:
        """Until cancelled."""
        if not self._addresses:
            return
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            while True:
                await self.look_at_all(client)
                await asyncio.sleep(self._interval)

    async def look_at_all(self, client: httpx.AsyncClient) -> None:
        """Every gateway once; those whose name no longer leads to them are forgotten."""
        parts = await asyncio.gather(*(self._expand(a) for a in self._addresses))
        now = [address for part in parts for address in part]
        for gone in self._history.gateways.keys() - {*now, *self._addresses}:
            self._history.forget_gateway(gone)
        await asyncio.gather(*(self.look(client, a) for a in now))

    async def _expand(self, address: str) -> list[str]:
        """The addresses to ask; none while a name does not resolve, which the page then says."""
        if not address.startswith(BY_NAME):
            return [address]
        url = urlsplit(address.removeprefix(BY_NAME))
        try:
            found = await self._resolve(url.hostname or "", url.port or 80)
        except (OSError, ValueError) as e:
            self._history.take_silence(address, f"{type(e).__name__}: {e}")
            return []
        self._history.forget_gateway(address)  # its addresses speak for it
        return [f"{url.scheme}://{host}" for host in found]

    async def look(self, client: httpx.AsyncClient, address: str) -> None:
        """One gateway's counters, once."""
        try:
            answer = await client.get(address.rstrip("/") + "/metrics")
            answer.raise_for_status()
            met, missed = counters(answer.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
            self._history.take_silence(address, f"{type(e).__name__}: {e}")
            return
        self._history.take_gateway(address, self._clock(), met, missed)


def counters(text: str) -> tuple[float, float]:
    """(met, missed) over all models of a gateway's /metrics. Raises ValueError on other text."""
    lines = [n for n in text.splitlines() if n.startswith((SLO_COUNTER, f"# TYPE {SLO_COUNTER}"))]
    sums = {"true": 0.0, "false": 0.0}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.labels.get("met") in sums:
                sums[sample.labels["met"]] += sample.value
    return sums["true"], sums["false"]


def _ends(kind: str) -> bool:
    return kind == "session_ended"


def _text(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, v in fields.items()}
