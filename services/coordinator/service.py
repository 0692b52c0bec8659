"""The coordinator while it holds the lease: sessions, fits, commands of the dispatcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from redis.exceptions import ResponseError

from services.coordinator import ahead
from services.coordinator.cluster import Cluster
from services.coordinator.context import SUSPENDED_SECONDS, Context
from services.coordinator.jobs import TrainingJobs
from services.coordinator.meters import Meters
from services.coordinator.search import Demand, Member, b_star
from services.coordinator.session import SessionRun
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.telemetry import Telemetry, hardware_of
from shared import dead_letters, names, sessions
from shared.adapters import AdapterRegistry
from shared.leader import Acting
from shared.messages import (
    BODY,
    DecodeError,
    StepSample,
    SuspendTraining,
    TrainSample,
    decode,
)
from shared.records import ReplicaRecord
from shared.redis_client import BLOCK_MS, connect_sync, ensure_group, is_missing_group
from shared.replica_state import State
from shared.tail import SampleReader, follow

log = logging.getLogger(__name__)

ROLE = "coordinator"
LOOK = 1.0  # seconds between looks for sessions, should an event be missed
GATHER = 0.25  # seconds between two reads of the metrics; fits are made every few seconds


class CoordinatorService:
    """``act`` is what the process does while it holds the lease."""

    def __init__(self, settings: CoordinatorSettings, meters: Meters) -> None:
        self._settings, self._meters = settings, meters

    async def act(self, acting: Acting) -> None:
        """Until cancelled; sessions that an earlier coordinator left are taken up."""
        settings, redis = self._settings, acting.redis
        sync = connect_sync(settings.redis_url, socket_timeout=30.0)
        context = Context(
            redis=redis,
            lease=acting.lease,
            now=acting.clock,
            settings=settings,
            registry=AdapterRegistry(redis, settings.data_dir),
            jobs=TrainingJobs(redis, sync),
            cluster=Cluster(redis),
            telemetry=Telemetry(settings.training.B0),
            meters=self._meters,
        )
        desk = Desk(context, acting)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(desk.learn(), name="metrics")
                group.create_task(desk.watch(), name="events")
                group.create_task(desk.obey(), name="commands")
                group.create_task(desk.refit(), name="fits")
                group.create_task(desk.sessions(group), name="sessions")
        finally:
            sync.close()


class Desk:
    """The tasks of one acting coordinator over one context."""

    def __init__(self, context: Context, acting: Acting) -> None:
        self._context, self._acting = context, acting
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._samples = SampleReader()

    # ------------------------------------------------------------ sessions

    async def sessions(self, group: asyncio.TaskGroup) -> None:
        """Start a task a session; an ended one is forgotten."""
        while True:
            self._acting.alive()
            for name in [n for n, task in self._running.items() if task.done()]:
                del self._running[name]
            for session in await sessions.live(self._context.redis):
                if session.id not in self._running:
                    log.info("session %s: %s", session.id, session.why)
                    run = SessionRun(self._context, session)
                    self._running[session.id] = group.create_task(run.run(), name=session.id)
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK):
                    await self._wake.wait()
            except TimeoutError:
                continue  # the regular look

    # ------------------------------------------------------------ what happens

    async def learn(self) -> None:
        """Samples into the books."""
        redis = self._context.redis
        async for _, entry_id, fields in follow(redis, [names.METRICS], gather=GATHER):
            if fields.get(b"kind") in (b"step", b"train"):
                self._take(self._samples.read(entry_id, fields))

    async def watch(self) -> None:
        """A new session wakes the loop at once."""
        async for _, entry_id, fields in follow(self._context.redis, [names.EVENTS]):
            await self._note(entry_id, fields)

    async def _note(self, entry: str, fields: Mapping[bytes, bytes]) -> None:
        """An event that concerns the coordinator."""
        if fields.get(b"kind") == b"session_opened":
            self._wake.set()
        elif fields.get(b"kind") == ahead.STORED:
            await ahead.prepare(self._context, entry, fields)

    def _take(self, sample: object) -> None:
        if isinstance(sample, StepSample):
            self._context.telemetry.step(sample)
        elif isinstance(sample, TrainSample):
            self._context.telemetry.train(sample)
            self._context.meters.trained(sample)

    # ------------------------------------------------------------ fits

    async def refit(self) -> None:
        """Coefficients of every replica into its record, for the dispatcher."""
        context, known = self._context, set[str]()
        while True:
            await asyncio.sleep(context.settings.refit_seconds)
            live = await context.cluster.live()
            for gone in known - live.keys():
                context.telemetry.forget(gone)
                context.meters.forget_replica(gone)
            known = set(live)
            for name, record in live.items():
                context.telemetry.describe(name, hardware_of(record))
            demands = {
                base: await context.demand(base) for base in {r.model for r in live.values()}
            }
            now = context.now()
            for record in live.values():
                await self._publish_fit(record, demands[record.model], now)

    async def _publish_fit(self, record: ReplicaRecord, demand: Demand, now: float) -> None:
        """Coefficients and, for a replica that no session configures, b* in its present state."""
        context, name = self._context, record.id
        planes = context.telemetry.planes(name, now)
        model = planes.model()
        if model is None or planes.decode is None:
            return
        fit = {"r2": planes.decode.r2, "r2_single": planes.decode.r2_single}
        context.meters.r2.labels(name, "two").set(fit["r2"])
        context.meters.r2.labels(name, "one").set(fit["r2_single"])
        context.meters.fit_error.labels(name).set(planes.decode.error)
        await context.cluster.publish_model(name, model, fit)
        if record.state != State.COMBINED:
            member = Member(id=name, model=model, b_max=record.b_max)
            await context.cluster.publish_b_star(name, b_star(member, record.B, demand))

    # ------------------------------------------------------------ the dispatcher's commands

    async def obey(self) -> None:
        """B = 0 wanted on replicas, or no longer: carried out at once, in mid-round."""
        redis = self._context.redis
        stream, group = names.COORDINATOR_CONTROL, names.GROUP_COORDINATOR
        await ensure_group(redis, stream, group)
        cursor = "0"  # first what an earlier coordinator read and did not finish
        while True:
            try:
                found = await redis.xreadgroup(
                    group, ROLE, {stream: cursor}, count=100, block=BLOCK_MS
                )
            except ResponseError as e:
                if not is_missing_group(e):
                    raise
                await ensure_group(redis, stream, group)
                continue
            entries = found[0][1] if found else []
            if cursor == "0" and not entries:
                cursor = ">"
            for entry_id, fields in entries:
                await self._obey(stream, group, entry_id, fields)

    async def _obey(
        self, stream: str, group: str, entry_id: bytes, fields: dict[bytes, bytes]
    ) -> None:
        redis = self._context.redis
        try:
            command = decode(fields.get(BODY, b""), SuspendTraining)
        except DecodeError as e:
            await dead_letters.bury(redis, stream, group, entry_id, fields, str(e), by=ROLE)
            return
        await self._suspend(command)
        async with redis.pipeline(transaction=True) as pipe:
            pipe.xack(stream, group, entry_id)
            pipe.xdel(stream, entry_id)
            await pipe.execute()

    async def _suspend(self, command: SuspendTraining) -> None:
        context = self._context
        wanted: dict[str, int] = {}
        for session in await sessions.live(context.redis):
            wanted.update(session.B)
        for replica in command.replicas:
            if command.wanted:
                context.wanted_idle[replica] = context.now() + SUSPENDED_SECONDS
                await context.cluster.pause(replica, 0)
                continue
            known = context.wanted_idle.pop(replica, None) is not None
            if known and wanted.get(replica, 0) > 0:
                await context.cluster.pause(replica, wanted[replica])
        log.info(
            "training %s on %s",
            "rests" if command.wanted else "goes on",
            ", ".join(command.replicas),
        )
