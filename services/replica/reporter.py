"""What a replica reports of itself while it serves: its record, utilisation, an empty queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis

from services.replica.gateways import GatewayWatch
from services.replica.gpu import GpuMeter, Place
from services.replica.link import BACKLOG, Turn
from services.replica.meters import Meters
from services.replica.worker import ServingLoop
from shared import names
from shared.clock import Now
from shared.messages import UtilSample
from shared.records import HEARTBEAT_SECONDS, ReplicaRecord
from shared.redis_client import TRANSIENT

log = logging.getLogger(__name__)

TICK = 1.0  # seconds between utilisation samples
_OWN = ("b", "b_max", "B", "in_flight", "waiting", "kv_free", "kv_total", "context", "adapters",
        "device", "gpu", "progress")  # fmt: skip


class Reporter:
    """Writes the fields of the record that the serving loop knows, as often as a heartbeat."""

    def __init__(
        self,
        redis: Redis,
        replica: str,
        loop: ServingLoop,
        now: Now,
        meters: Meters,
        tell: Callable[[dict[str, Any]], None],
        place: Place,
        gpu: GpuMeter | None = None,
    ) -> None:
        self._redis, self._replica, self._loop = redis, replica, loop
        self._now, self._meters, self._tell = now, meters, tell
        self._ticked = time.monotonic()
        self._busy = loop.block.busy_seconds
        self._told_drain = False
        self._place, self._gpu = place, gpu
        self._gateways = GatewayWatch(redis)
        self._leftover: set[str] = set()  # gateways that are gone, their reply stream not yet

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            try:
                await self._write()
                await self._look_for_drain()
                await self._look_for_gateways()
            except TRANSIENT as e:
                log.debug("%s: record not written: %s", self._replica, e)
            if time.monotonic() - self._ticked >= TICK:
                self._tick()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _write(self) -> None:
        loop, status = self._loop, self._loop.status
        record = ReplicaRecord(
            b=status.b_limit,
            b_max=loop.engine.b_max,
            B=loop.block.B,
            in_flight=len(loop.desk.books.members),
            waiting=status.waiting,
            kv_free=status.kv_total - status.kv_used,
            kv_total=status.kv_total,
            context=loop.engine.card.context,
            adapters=status.adapters,
            device=self._place.device,
            gpu=self._place.gpu,
            progress=self._now() - (time.monotonic() - loop.block.progress_time),
        )
        await self._redis.hset(names.replica(self._replica), mapping=record.to_hash(*_OWN))

    def _tick(self) -> None:
        """One utilisation sample: what the GPU says, else the share of time in engine steps."""
        now = time.monotonic()
        seconds, self._ticked = now - self._ticked, now
        busy = self._loop.block.busy_seconds
        share, self._busy = (busy - self._busy) / seconds, busy
        status, source = self._loop.status, "step_share"
        # The GPU cannot tell serving from training: beside training only our own steps count.
        if self._gpu is not None and not self._loop.block.training:
            share, source = self._gpu.read() or (share, source)
        sample = UtilSample(
            replica=self._replica,
            time=self._now(),
            utilisation=min(1.0, max(0.0, share)),
            queued=status.waiting,
            b=self._loop.mean_b(seconds),
            source=source,
        )
        lag = getattr(self._loop.engine, "lag", None)
        self._meters.state(self._replica, status, None if lag is None else lag.p99())
        if self._loop.publisher.backlog < BACKLOG:
            self._loop.publisher.put(Turn(samples=[("util", sample)]))

    async def _look_for_drain(self) -> None:
        loop = self._loop
        if loop.desk.drain_wanted is not None and not self._told_drain:
            self._told_drain = True
            self._tell({"drain": {self._replica: loop.desk.drain_wanted}})
        if loop.draining and loop.empty and not loop.publisher.backlog:
            left = await self._redis.xlen(names.batches(self._replica))
            if not left and loop.empty and not loop.publisher.backlog:
                self._tell({"drained": self._replica})

    async def _look_for_gateways(self) -> None:
        members = self._loop.desk.books.members.values()
        for gateway in await self._gateways.gone(m.request.gateway for m in members):
            log.warning("%s: gateway %s is gone; its requests end", self._replica, gateway)
            self._loop.forget(gateway)
            self._leftover.add(gateway)
        # Its last tokens may be on their way still, and would make the stream again.
        busy = {m.request.gateway for m in members}
        for gateway in sorted(self._leftover - busy) if not self._loop.publisher.backlog else ():
            await self._gateways.remove(gateway)
            self._leftover.discard(gateway)
