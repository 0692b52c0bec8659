"""The parent process of a replica: children, heartbeats, states, orderly end.

It holds no model and no torch; it outlives its children and keeps their control blocks. A child
that dies is started again while the other goes on. Heartbeats stop when the serving loop makes
no progress, so that a hung replica is found dead and its requests go elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.replica import inference
from services.replica.children import Child, GaveUp
from services.replica.control_block import ControlBlock
from services.replica.hang import HangWatch
from services.replica.incarnation import Incarnation
from services.replica.meters import ChildMetrics
from services.replica.settings import ReplicaSettings
from services.replica.trainer_child import TrainerChild
from services.replica.weights_child import WeightsChild
from shared.records import HEARTBEAT_SECONDS
from shared.redis_client import TRANSIENT, connect, patiently, stand_ready
from shared.replica_state import Refused, State
from shared.status_server import StatusServer

log = logging.getLogger(__name__)

BEGIN_TIMEOUT = 30.0  # seconds for a living child to take up a new incarnation
STOP_SECONDS = 5.0
METRICS_SECONDS = 2.0  # for a child to write its metrics when they are looked at


class Supervisor:
    """Runs until asked to stop. One inference child serves all replicas of this process."""

    def __init__(self, settings: ReplicaSettings, training: dict[str, object]) -> None:
        self._settings = settings
        self._redis: Redis = connect(settings.redis_url)
        self._lives = {
            replica: Incarnation(
                self._redis,
                replica,
                settings.model,
                settings.engine,
                settings.thread_count,
                trains=settings.training,
            )
            for replica in settings.replicas
        }
        self._blocks = {
            replica: ControlBlock.create(settings.control_path(replica))
            for replica in settings.replicas
        }
        self._inference = Child(
            "inference",
            inference.main,
            inference.configuration(settings, None),
            heard=self._heard,
            restarts=settings.restarts,
        )
        # An emulated replica has no weights to train.
        trains = settings.training and settings.engine == "torch"
        self._weights = WeightsChild(settings, self._weights_lost)
        self._trainer = TrainerChild(settings, training, self._weights.share) if trains else None
        self._hang = HangWatch(self._inference, settings.step_timeout)
        self._ready = asyncio.Event()
        self._begun: dict[str, str] = {}
        self._serving: set[str] = set()
        self._drained: set[str] = set()
        self._changed = asyncio.Event()  # something was heard from the child
        self._retiring: set[str] = set()  # of several replicas: these drain, the others go on
        self._away: str | None = None  # why Redis cannot be reached
        self._draining = False
        self._hurry = asyncio.Event()
        self._stop = asyncio.Event()
        self._fatal: str | None = None  # why the inference child can never start
        self._metrics = ChildMetrics()
        registry = CollectorRegistry()
        registry.register(self._metrics)
        self._metrics_came = asyncio.Event()
        self._status = StatusServer(registry, self.live, self.ready, self._ask_for_metrics)

    # ------------------------------------------------------------ asked from outside

    def request_stop(self) -> None:
        """First call: drain. Second call: give back what still runs and stop at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def live(self) -> str | None:
        """None while the serving loops make progress."""
        stuck = [f"{r}: {why}" for r in self._blocks if (why := self._stuck(r)) is not None]
        return "; ".join(stuck) or None

    def ready(self) -> str | None:
        """None while every replica of this process serves."""
        if self._away is not None:
            return self._away
        waiting = sorted(set(self._lives) - self._serving)
        return f"not serving yet: {', '.join(waiting)}" if waiting else self.live()

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Until ``request_stop``, or GaveUp, IdInUse."""
        await self._status.start(self._settings.host, self._settings.port)
        try:
            await patiently(lambda: stand_ready(self._redis), "the start")
            for life in self._lives.values():
                await patiently(life.take_id, "the start")
            await self._begin_all("started")
            async with asyncio.TaskGroup() as tasks:
                jobs = [
                    tasks.create_task(self._weights.keep()),
                    tasks.create_task(self._keep_inference()),
                    tasks.create_task(self._beat()),
                ]
                if self._trainer is not None:
                    jobs.append(tasks.create_task(self._train()))
                await self._stop.wait()
                await self._drain()
                for job in jobs:
                    job.cancel()
        except* GaveUp as group:
            await self._bury_all(str(group.exceptions[0]))
            raise
        finally:
            await self._end()

    async def _begin_all(self, why: str) -> None:
        for replica, life in list(self._lives.items()):
            self._serving.discard(replica)
            await patiently(partial(life.begin, why), "the start")

    async def _keep_inference(self) -> None:
        """Start the inference child, and again whenever it dies."""
        while True:
            weights = await self._weights.share()
            self._inference.config = inference.configuration(self._settings, weights)
            self._ready.clear()
            self._begun.clear()
            for block in self._blocks.values():
                block.pulse = block.progress_time = time.monotonic()
                block.step_started = 0.0
            self._inference.start()
            start = asyncio.create_task(self._open())
            how = await self._inference.ended()
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            if self._fatal is not None:
                raise GaveUp(self._fatal)
            log.error("inference process %s; its requests are given back", how)
            why = f"inference process {how}"
            await self._begin_all(why)
            await self._inference.pause_before_restart(how)

    def _weights_lost(self) -> None:
        """The memory that both children compute on is no more."""
        self._inference.kill()
        if self._trainer is not None:
            self._trainer.kill()

    async def _open(self) -> None:
        """Wait until the child has loaded, then let every replica serve."""
        try:
            async with asyncio.timeout(self._settings.load_timeout):
                await self._ready.wait()
        except TimeoutError:
            log.error("model not loaded within %.0f s", self._settings.load_timeout)
            self._inference.kill()
            return
        for replica in list(self._lives):
            await self._open_one(replica)

    async def _open_one(self, replica: str) -> None:
        """Hand the child its incarnation; when it has taken it up, move to ``serving``."""
        life = self._lives[replica]
        self._inference.tell({"begin": {replica: life.id}})
        try:
            async with asyncio.timeout(BEGIN_TIMEOUT):
                while self._begun.get(replica) != life.id:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.error("%s: inference process does not take up its incarnation", replica)
            self._inference.kill()
            return
        try:
            await patiently(lambda: life.serve("model and adapters are loaded"), "the start")
        except Refused as e:
            log.warning("%s", e)  # drained meanwhile, or declared dead
            found = await patiently(lambda: life.beat(alive=True), "the start")
            if found.state is State.DEAD and not self._draining:
                await self._reborn(replica)
            return
        self._serving.add(replica)
        log.info("%s serves", replica)

    # ------------------------------------------------------------ heartbeats

    async def _beat(self) -> None:
        while True:
            started = time.monotonic()
            for replica in list(self._lives):
                try:
                    await self._beat_one(replica)
                    self._away = None
                except TRANSIENT as e:
                    if self._away is None:
                        log.warning("no heartbeat: Redis is away (%s: %s)", type(e).__name__, e)
                    self._away = f"Redis is away: {e}"
                    break
            await asyncio.sleep(max(0.0, HEARTBEAT_SECONDS - (time.monotonic() - started)))

    async def _beat_one(self, replica: str) -> None:
        life, stuck = self._lives[replica], self._stuck(replica)
        self._hang.note(replica, stuck)
        beat = await life.beat(alive=stuck is None)
        if replica in self._retiring:
            await self._retire(replica, beat.state)
        if replica not in self._serving:
            return
        if beat.state is None and not beat.ours:
            log.warning("%s: Redis has lost our record; it is written again", replica)
            await life.restore()
            self._inference.tell({"card": True})
        elif not beat.ours:
            log.critical("%s: another process has taken this id; this one stops", replica)
            self._hurry.set()
            self._stop.set()
        elif beat.state is State.DEAD:
            await self._reborn(replica)

    async def _retire(self, replica: str, state: State | None) -> None:
        """One step of draining a single replica of several; called with every heartbeat."""
        life = self._lives[replica]
        if state is not State.DRAINING and replica in self._serving:
            await life.move(State.DRAINING, "asked to drain")
            self._serving.discard(replica)
            self._inference.tell({"drain": [replica]})
        elif replica in self._drained:
            await life.move(State.STOPPED, "drained")
            await life.end()
            self._retiring.discard(replica)
            del self._lives[replica]

    async def _reborn(self, replica: str) -> None:
        """We were declared dead: drop everything, go on as a new incarnation."""
        log.warning("%s was declared dead; it starts as a new incarnation", replica)
        self._serving.discard(replica)
        await self._lives[replica].begin("was declared dead")
        if self._ready.is_set():
            await self._open_one(replica)

    def _stuck(self, replica: str) -> str | None:
        if not (self._inference.alive and self._ready.is_set()):
            return None  # it loads, within ``load_timeout``; the replica says ``starting``
        return self._hang.why(self._blocks[replica])

    # ------------------------------------------------------------ words from the child

    def _heard(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            for block in self._blocks.values():
                block.progress_time = time.monotonic()
            self._ready.set()
        self._fatal = message.get("fatal", self._fatal)
        self._begun.update(message.get("begun", {}))
        if "metrics" in message:
            self._metrics.text = message["metrics"]
            self._metrics_came.set()
        if "drained" in message:
            self._drained.add(message["drained"])
        for replica, reason in message.get("drain", {}).items():
            log.info("%s: drain (%s)", replica, reason)
            if len(self._lives) == 1:
                self._stop.set()
            else:
                self._retiring.add(replica)
        self._changed.set()

    async def _ask_for_metrics(self) -> None:
        """Let the child write its metrics: ms of its event loop, so only when somebody looks."""
        if not (self._inference.alive and self._ready.is_set()):
            return
        self._metrics_came.clear()
        self._inference.tell({"metrics": True})
        try:
            await asyncio.wait_for(self._metrics_came.wait(), METRICS_SECONDS)
        except TimeoutError:
            log.warning("no metrics from the inference process in %.0f s", METRICS_SECONDS)
            self._metrics.text = ""

    async def _train(self) -> None:
        assert self._trainer is not None
        await self._ready.wait()
        await self._trainer.keep()

    # ------------------------------------------------------------ the end

    async def _drain(self) -> None:
        """Finish what was taken, within the time limit or until asked again to stop."""
        self._draining = True
        for replica, life in list(self._lives.items()):
            self._blocks[replica].stopping = 1
            await self._quietly(life.move(State.DRAINING, "asked to stop"))
        self._inference.tell({"drain": list(self._lives)})
        log.info("draining for up to %.0f s", self._settings.drain_seconds)
        hurry = asyncio.create_task(self._hurry.wait())
        done = asyncio.create_task(self._all_drained())
        await asyncio.wait(
            [hurry, done],
            timeout=self._settings.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done.done():
            log.warning("not everything was finished; the rest is given back")
        for task in (hurry, done):
            task.cancel()

    async def _all_drained(self) -> None:
        while not set(self._serving) <= self._drained:
            self._changed.clear()
            await self._changed.wait()

    async def _end(self) -> None:
        """Stop the children, give back what is left, say ``stopped``."""
        if self._trainer is not None:
            await self._trainer.stop()
        await self._inference.stop(STOP_SECONDS)
        await self._weights.stop()
        for life in self._lives.values():
            if life.id:
                await self._quietly(self._leave(life))
        await self._status.stop()
        await self._redis.aclose()
        for block in self._blocks.values():
            block.close()

    async def _leave(self, life: Incarnation) -> None:
        await life.give_back("stopped before its end")
        if (await life.beat(alive=False)).ours:
            await life.move(State.STOPPED, "stopped")
            await life.end()

    async def _bury_all(self, why: str) -> None:
        for life in self._lives.values():
            await self._quietly(life.bury(why))

    @staticmethod
    async def _quietly(step: Any) -> None:
        """A step of the end that a Redis which is away must not hold up for long."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await step
        except (TimeoutError, *TRANSIENT) as e:
            log.warning("Redis is away at the end (%s); the dispatcher finds out by itself", e)
