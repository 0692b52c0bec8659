"""The coordinator's hands on replicas: their records, states, batch sizes, adapter versions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec
import orjson
from redis.asyncio import Redis

from shared import names
from shared.adapters import AdapterVersion
from shared.control import send_command
from shared.latency import LatencyModel
from shared.messages import Configure, LoadAdapter, Message
from shared.records import ReplicaRecord
from shared.replica_state import Refused, State, move

log = logging.getLogger(__name__)

ROLE = "coordinator"


class Cluster:
    """Reads and moves replicas; every command is one entry of a control stream."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def live(self) -> dict[str, ReplicaRecord]:
        """Records of replicas with a heartbeat; damaged ones are left out and told."""
        found = {}
        for raw in sorted(await self._redis.smembers(names.REPLICAS)):
            record = await self.record(raw.decode())
            if record is not None:
                found[record.id] = record
        return found

    async def record(self, replica: str) -> ReplicaRecord | None:
        """None without a heartbeat or record."""
        if not await self._redis.exists(names.replica_alive(replica)):
            return None
        raw = await self._redis.hgetall(names.replica(replica))
        if not raw:
            return None
        try:
            return ReplicaRecord.from_hash(raw)
        except (msgspec.ValidationError, orjson.JSONDecodeError) as e:
            log.error("the record of %s is damaged: %s", replica, e)
            return None

    async def combine(self, replica: str, session: str) -> bool:
        """Idle -> Combined; True as well if it is Combined already. False: somewhere else."""
        record = await self.record(replica)
        if record is None:
            return False
        if record.state == State.COMBINED:
            return True
        try:
            await move(
                self._redis,
                replica,
                State.COMBINED,
                by=ROLE,
                why=f"trains in session {session}",
                expected=frozenset({State.IDLE}),
                incarnation=record.incarnation,
            )
        except Refused as e:
            log.info("%s does not join session %s: %s", replica, session, e)
            return False
        return True

    async def release(self, replica: str, why: str) -> None:
        """Combined -> Serving with its training at rest; a refusal is logged."""
        await self.configure(replica, B=0)
        try:
            only = frozenset({State.COMBINED})
            await move(self._redis, replica, State.SERVING, by=ROLE, why=why, expected=only)
        except Refused as e:
            log.info("%s stays as it is: %s", replica, e)

    async def configure(self, replica: str, *, b: int | None = None, B: int | None = None) -> None:
        """Send limits, and write B* and b* into the record."""
        await self._command(replica, Configure(b=b, B=B))
        stars = {"B_star": B, "b_star": b}
        mapping = {k: str(v) for k, v in stars.items() if v is not None}
        if mapping:
            await self._redis.hset(names.replica(replica), mapping=mapping)

    async def pause(self, replica: str, B: int) -> None:
        """Only the micro-batch in force: 0 rests the trainer within one micro-step."""
        await self._command(replica, Configure(B=B))

    async def publish_model(
        self, replica: str, model: LatencyModel, fit: Mapping[str, float]
    ) -> None:
        """Coefficients (and the fits' R2) into the record, for the dispatcher."""
        values = {**msgspec.to_builtins(model), **fit}
        raw = orjson.dumps({k: float(v) for k, v in values.items()})
        await self._redis.hset(names.replica(replica), "coefficients", raw)

    async def publish_b_star(self, replica: str, b: int) -> None:
        """b* of a replica that only serves; its limit b stays its own and the dispatcher's."""
        await self._redis.hset(names.replica(replica), "b_star", str(b))

    async def announce(self, name: str, entry: AdapterVersion, replicas: Iterable[str]) -> None:
        """Every replica takes the version at its next step, and its quality with it."""
        for replica in replicas:
            load = LoadAdapter(
                name=name,
                version=entry.version,
                path=entry.path,
                reply_to=f"{name}:{entry.version}",
            )
            await self._command(replica, load)
            await self._redis.hset(names.replica(replica), "q", str(entry.quality))

    async def _command(self, replica: str, message: Message) -> None:
        await send_command(self._redis, names.control(replica), message)
