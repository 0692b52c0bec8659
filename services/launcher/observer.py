"""What the launcher sees: metrics of the last tick, replica records, sessions, data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import orjson
from redis.asyncio import Redis

from services.launcher.settings import LauncherSettings
from services.launcher.terms import Seen, SessionSeen
from services.launcher.windows import Load
from shared import demand, names, sessions
from shared.adapters import AdapterRegistry
from shared.demand import ModelDemand
from shared.messages import StepSample, UtilSample
from shared.records import ReplicaRecord
from shared.replica_state import ANSWERING
from shared.tail import SampleReader, follow

log = logging.getLogger(__name__)

GATHER = 0.25  # of a tick, between two reads of the metrics


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """One tick's view of the cluster."""

    replicas: tuple[Seen, ...]
    records: Mapping[str, ReplicaRecord]
    arrivals: Mapping[str, float]  # requests in this tick, a base
    sessions: tuple[SessionSeen, ...]


class Observer:
    """``watch`` runs beside the loop and gathers samples; ``look`` closes a tick."""

    def __init__(self, redis: Redis, registry: AdapterRegistry, settings: LauncherSettings) -> None:
        self._redis, self._registry, self._settings = redis, registry, settings
        self._loads: dict[str, Load] = {}
        self._finished: dict[str, int] = {}
        self._lengths: dict[str, tuple[float, float]] = {}  # base -> mean prompt, output
        self._inside: dict[str, int] = {}  # base -> requests in the system at the last tick
        self._samples = SampleReader()

    async def watch(self) -> None:
        """Follow the metrics stream until cancelled."""
        gather = GATHER * self._settings.tick
        async for _, entry_id, fields in follow(self._redis, [names.METRICS], gather=gather):
            if fields.get(b"kind") not in (b"util", b"step"):
                continue
            self._take(self._samples.read(entry_id, fields))

    def _take(self, sample: object) -> None:
        if isinstance(sample, UtilSample):
            self._loads[sample.replica] = Load(
                utilisation=sample.utilisation,
                queued=float(sample.queued),
                b=sample.b,
                source=sample.source,
            )
        elif isinstance(sample, StepSample) and sample.finished:
            done = [f for f in sample.finished if f.reason in ("stop", "length")]
            self._finished[sample.replica] = self._finished.get(sample.replica, 0) + len(done)
            prompt, output = self._lengths.get(sample.model, (128.0, 128.0))
            for f in done:
                prompt += (f.prompt_tokens - prompt) / 50
                output += (f.output_tokens - output) / 50
            self._lengths[sample.model] = (prompt, output)

    async def look(self) -> Picture:
        """The cluster now; samples gathered since the last call are used up."""
        records = await self._records()
        loads, finished = self._loads, self._finished
        self._loads, self._finished = {}, {}
        bases = sorted({r.model for r in records.values()})
        demands = {base: await demand.read(self._redis, base) for base in bases}
        arrivals = {
            base: await self._arrivals(base, records, finished, demands[base]) for base in bases
        }
        trained = await self._trained(records)
        live = await sessions.live(self._redis)
        running = tuple([await self._session(s) for s in live])
        suspended = _suspended(live, records)
        seen = tuple(
            self._seen(
                record,
                loads.get(name),
                finished.get(name, 0),
                demands[record.model],
                trained,
                name in suspended,
            )
            for name, record in sorted(records.items())
        )
        return Picture(replicas=seen, records=records, arrivals=arrivals, sessions=running)

    async def _records(self) -> dict[str, ReplicaRecord]:
        """Live replicas: heartbeat there, state one that serves or trains."""
        found = {}
        for raw in sorted(await self._redis.smembers(names.REPLICAS)):
            name = raw.decode()
            if not await self._redis.exists(names.replica_alive(name)):
                continue
            try:
                record = ReplicaRecord.from_hash(await self._redis.hgetall(names.replica(name)))
            except (msgspec.ValidationError, orjson.JSONDecodeError) as e:
                log.error("the record of %s is damaged and left out: %s", name, e)
                continue
            if record.state in ANSWERING:
                found[name] = record
        return found

    async def _arrivals(
        self,
        base: str,
        records: Mapping[str, ReplicaRecord],
        finished: Mapping[str, int],
        said: ModelDemand | None,
    ) -> float:
        """Requests that came in this tick: finished ones plus the change of those inside."""
        own = [r for r in records.values() if r.model == base]
        waiting = int(await self._redis.xlen(names.requests(base)))
        inside = waiting + sum(r.in_flight for r in own)
        done = sum(finished.get(r.id, 0) for r in own)
        came = max(0, done + inside - self._inside.get(base, inside))
        self._inside[base] = inside
        return said.rate * self._settings.tick if said is not None else float(came)

    async def _trained(self, records: Mapping[str, ReplicaRecord]) -> dict[str, Mapping[str, int]]:
        found: dict[str, Mapping[str, int]] = {}
        for adapter in sorted({a for r in records.values() for a in r.data}):
            entry = await self._registry.get(adapter)
            found[adapter] = entry.trained if entry is not None else {}
        return found

    async def _session(self, session: sessions.Session) -> SessionSeen:
        wishes = await sessions.wishes(self._redis, session.id)
        return SessionSeen(
            id=session.id,
            adapter=session.adapter,
            base=session.base,
            clients=tuple(sorted({*session.clients, *wishes.join} - wishes.leave.keys())),
            losses={c: v for c, v in session.losses.items() if c not in wishes.leave},
            open=not (wishes.pause or wishes.stop),
        )

    def _seen(
        self,
        record: ReplicaRecord,
        load: Load | None,
        finished: int,
        said: ModelDemand | None,
        trained: Mapping[str, Mapping[str, int]],
        suspended: bool,
    ) -> Seen:
        rate, training = self._rates(record, said)
        return Seen(
            id=record.id,
            base=record.model,
            state=record.state,
            load=load,
            rate=rate,
            rate_training=training,
            finished=float(finished),
            quality=record.q,
            data=record.data,
            fresh={a: self._fresh(n, trained[a].get(record.id, 0)) for a, n in record.data.items()},
            suspended=suspended,
        )

    def _fresh(self, held: int, seen: int) -> int:
        """Samples not trained on; a few more than last time are not worth a session."""
        new = held - seen
        return 0 if seen > 0 and new < self._settings.fresh_min else max(0, new)

    def _rates(
        self, record: ReplicaRecord, said: ModelDemand | None
    ) -> tuple[float | None, float | None]:
        """Requests per second at the present B, and at B0; None without coefficients."""
        model = record.latency()
        if model is None:
            return None, None
        prompt, output = self._lengths.get(record.model, (128.0, 128.0))
        if said is not None and said.output > 0:
            prompt, output = said.prompt, said.output

        def at(B: int) -> float:
            b = record.b_max
            if said is not None and said.budget is not None:
                b = model.b_star(
                    said.budget,
                    B,
                    said.limited_prompt or prompt,
                    said.limited_output or output,
                    b_max=record.b_max,
                    slo=said.slo,
                    tpot=said.tpot,
                )
            return model.rate(b, B, prompt, output) if b > 0 else 0.0

        return at(record.B), at(self._settings.B0)


def _suspended(
    live: Sequence[sessions.Session], records: Mapping[str, ReplicaRecord]
) -> frozenset[str]:
    """Clients that load keeps from training: B = 0 by decision, or in force in mid-round."""
    found = set()
    for session in live:
        for client, B in session.B.items():
            resting = client in records and records[client].B == 0
            if B == 0 or (resting and session.phase == sessions.Phase.TRAIN):
                found.add(client)
    return frozenset(found)
