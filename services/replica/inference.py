"""The inference process of a replica: engine, serving loop, Redis side, under one roof.

Started by the parent (``supervisor``) with ``configuration`` and one pipe. It says ``ready``
when model and adapters are loaded and serves once the parent has named its incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import orjson
import uvloop
from redis.asyncio import Redis

from services.replica import gpu, pipes
from services.replica.adapter_loads import AdapterLoads
from services.replica.control_block import ControlBlock
from services.replica.engines import registry
from services.replica.engines.base import Engine
from services.replica.intake import Arrived
from services.replica.link import Intake, Publisher
from services.replica.meters import Meters
from services.replica.reporter import Reporter
from services.replica.settings import ReplicaSettings
from services.replica.slots import Slots
from services.replica.solo_pace import SoloPace
from services.replica.worker import ServingLoop
from shared import logs, names
from shared.adapters import AdapterRegistry
from shared.clock import RedisClock
from shared.redis_client import connect, patiently, stand_ready

log = logging.getLogger(__name__)

PULSE = 0.25  # seconds
CLOCK_PERIOD = 10.0  # seconds between measurements of Redis time


def configuration(settings: ReplicaSettings, weights: dict[str, Any] | None) -> str:
    """What ``main`` takes; ``weights``: the handle of weights that another process holds."""
    return orjson.dumps({"settings": settings.model_dump_json(), "weights": weights}).decode()


def main(config_json: str, pipe: Connection) -> None:
    """Entry point of the child process."""
    config = orjson.loads(config_json)
    settings = ReplicaSettings.model_validate_json(config["settings"])
    # Ctrl-C reaches the whole group; the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.setup(f"{settings.replicas[0]}/inference", settings.log_level, settings.log_format)
    uvloop.run(Inference(settings, config["weights"], pipe).run())
    sys.exit(0)


class Inference:
    """Everything of the child process."""

    def __init__(
        self, settings: ReplicaSettings, weights: dict[str, Any] | None, pipe: Connection
    ) -> None:
        self._settings, self._weights, self._pipe = settings, weights, pipe
        self._redis: Redis = connect(settings.redis_url)
        self._clock = RedisClock()
        self._blocks = {
            replica: ControlBlock.open(settings.control_path(replica))
            for replica in settings.replicas
        }
        self._meters = Meters(settings.model, settings.engine)
        self._loops: dict[str, ServingLoop] = {}
        self._stop = asyncio.Event()
        self._card_wanted = asyncio.Event()
        self._begun: dict[str, asyncio.Event] = {}

    async def run(self) -> None:
        """Load, report ready, serve until told to stop or the parent is gone."""
        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(self._pulse())]
            await patiently(lambda: stand_ready(self._redis), "the start")
            await patiently(lambda: self._clock.synchronise(self._redis), "the start")
            jobs.append(tasks.create_task(self._keep_time()))
            engines = await self._load()
            pipes.listen(self._pipe, self._heard, self._stop.set)
            self._told({"ready": True})
            for replica, engine in engines.items():
                jobs += self._serve(tasks, replica, self._loops[replica], engine)
            intake = Intake(self._redis, engines, self._arrived)
            jobs.append(tasks.create_task(intake.run()))
            jobs.append(tasks.create_task(self._keep_card(engines)))
            await self._stop.wait()
            for job in jobs:
                job.cancel()
        for engine in engines.values():
            engine.close()
        await self._redis.aclose()

    # ------------------------------------------------------------ start

    async def _load(self) -> dict[str, Engine]:
        started = time.monotonic()
        beside = {replica: _beside(block) for replica, block in self._blocks.items()}
        try:
            engines = await asyncio.to_thread(
                registry.build, self._settings, self._clock, beside, self._weights
            )
        except (ValueError, OSError) as e:
            # A bad folder or profile does not get better by another start.
            self._told({"fatal": f"the engine cannot be built: {e}"})
            raise SystemExit(1) from e
        adapters = AdapterRegistry(self._redis, self._settings.data_dir)
        slots = None
        if self._settings.engine == "torch":
            slots = Slots(self._settings.slot_folder, self._settings.slot_count)
        for replica, engine in engines.items():
            self._prepare(replica, engine, adapters, slots)
        for loop in self._loops.values():
            await patiently(loop.loads.load_all, "loading of adapters")
            await patiently(loop.loads.count_data, "counting of training data")
            if self._settings.training and self._settings.engine == "torch":
                loop.loads.watch(registry.shadow(self._settings, loop.engine))
        await patiently(lambda: self._publish_card(engines), "the model's card")
        log.info("model %s ready in %.1f s", self._settings.model, time.monotonic() - started)
        return engines

    def _prepare(
        self, replica: str, engine: Engine, adapters: AdapterRegistry, slots: Slots | None
    ) -> None:
        block = self._blocks[replica]
        wanted = self._settings.b or engine.b_max
        block.b = max(1, min(block.b or wanted, engine.b_max))
        engine.configure(b=block.b)
        block.inference_pid = os.getpid()
        block.step_started = 0.0
        self._begun[replica] = asyncio.Event()
        self._loops[replica] = ServingLoop(
            replica,
            engine,
            Publisher(self._redis, replica, engine.card.name, self._settings.metrics_kept),
            AdapterLoads(replica, engine, adapters, block),
            block,
            self._clock,
            meters=self._meters,
            slots=slots,
            threads=1 if gpu.place_of(engine).gpu else self._settings.thread_count,
            pace=SoloPace() if self._settings.training else None,
        )

    async def _keep_card(self, engines: dict[str, Engine]) -> None:
        """Publish the model's card again after Redis has lost it."""
        while True:
            await self._card_wanted.wait()
            self._card_wanted.clear()
            await patiently(lambda: self._publish_card(engines), "the model's card")

    async def _publish_card(self, engines: dict[str, Engine]) -> None:
        card = next(iter(engines.values())).card
        await self._redis.sadd(names.MODELS, card.name)
        await self._redis.hset(names.model(card.name), mapping=card.to_hash())

    def _serve(
        self, tasks: asyncio.TaskGroup, replica: str, loop: ServingLoop, engine: Engine
    ) -> list[asyncio.Task[None]]:
        place = gpu.place_of(engine)
        meter = gpu.open_meter(place.gpu) if place.gpu else None
        reporter = Reporter(
            self._redis, replica, loop, self._clock, self._meters, self._told, place, meter
        )
        return [
            tasks.create_task(self._from_start(replica, loop)),
            tasks.create_task(loop.publisher.run()),
            tasks.create_task(reporter.run()),
        ]

    async def _from_start(self, replica: str, loop: ServingLoop) -> None:
        await self._begun[replica].wait()
        await loop.run()

    # ------------------------------------------------------------ while it runs

    async def _pulse(self) -> None:
        """Show that the event loop runs; and, before the first turn, that loading goes on."""
        while True:
            now = time.monotonic()
            for replica, block in self._blocks.items():
                block.pulse = now
                begun = self._begun.get(replica)
                if begun is None or not begun.is_set():
                    block.progress_time = now
            await asyncio.sleep(PULSE)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_PERIOD)
            await patiently(lambda: self._clock.synchronise(self._redis), "the clock")

    def _arrived(
        self, replica: str, stream: bytes, entry: bytes, fields: dict[bytes, bytes]
    ) -> None:
        is_batch = stream.endswith(b":batches")
        self._loops[replica].arrive(
            Arrived(stream=stream, entry=entry, fields=fields, is_batch=is_batch)
        )

    def _told(self, message: dict[str, Any]) -> None:
        pipes.send(self._pipe, message)

    def _heard(self, message: dict[str, Any]) -> None:
        """A word from the parent."""
        for replica, incarnation in message.get("begin", {}).items():
            begun = {"begun": {replica: incarnation}}
            self._loops[replica].begin(incarnation, partial(self._told, begun))
            self._begun[replica].set()
        for replica in message.get("drain", ()):
            self._loops[replica].draining = True
        if message.get("metrics"):
            self._told({"metrics": self._meters.text()})
        if message.get("card"):
            self._card_wanted.set()
        if message.get("stop"):
            self._stop.set()


def _beside(block: ControlBlock) -> Any:
    """Reader of the micro-batch that trains beside the engine right now."""
    return lambda: block.micro_samples if block.micro_started else 0
