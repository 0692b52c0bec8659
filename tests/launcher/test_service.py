"""The launcher on a real Redis: what it sees, what it moves, what it writes down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.launcher.service import LauncherService, Meters
from services.launcher.settings import LauncherSettings
from shared import names, sessions
from shared.adapters import AdapterRegistry
from shared.clock import RedisClock
from shared.leader import Acting
from shared.lease import Lease
from shared.messages import BODY, UtilSample, encode
from shared.records import ReplicaRecord

OPTIONS: dict[str, Any] = {
    "tick": 0.1,
    "window": 3,
    "window_min": 3,
    "window_max": 3,
    "patience_idle": 1000,
}


class World:
    """Replica records with heartbeats, and their utilisation as metrics."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.load: dict[str, float] = {}

    async def replica(self, name: str, state: str = "serving", **changes: Any) -> None:
        record = ReplicaRecord(id=name, model="m", incarnation="1", b_max=8, state=state, **changes)
        await self.redis.hset(names.replica(name), mapping=record.to_hash())
        await self.redis.sadd(names.REPLICAS, name)
        self.load[name] = 0.0

    async def beat(self) -> None:
        """Heartbeats and samples for ever."""
        while True:
            for name, load in list(self.load.items()):
                await self.redis.set(names.replica_alive(name), "1", px=60_000)
                sample = UtilSample(
                    replica=name, time=0.0, utilisation=load, queued=0, b=8 * load, source="test"
                )
                fields = {"kind": "util", BODY: encode(sample)}
                await self.redis.xadd(names.METRICS, fields)
            await asyncio.sleep(0.03)

    async def state(self, name: str) -> str:
        raw = await self.redis.hget(names.replica(name), "state")
        return raw.decode() if raw else ""

    async def events(self, kind: str) -> list[dict[str, str]]:
        found = []
        for _, fields in await self.redis.xrange(names.EVENTS):
            plain = {k.decode(): v.decode() for k, v in fields.items()}
            if plain["kind"] == kind:
                found.append(plain)
        return found

    async def event(self, kind: str) -> dict[str, str]:
        async with asyncio.timeout(180):
            while True:
                if found := await self.events(kind):
                    return found[0]
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def launched(redis: Redis, data_dir: Path, **changes: Any) -> AsyncIterator[World]:
    world = World(redis)
    settings = LauncherSettings.model_validate({**OPTIONS, "data_dir": data_dir, **changes})
    lease = Lease(redis, "launcher")
    assert await lease.try_acquire()
    clock = RedisClock()
    await clock.synchronise(redis)
    service = LauncherService(settings, Meters())
    tasks = [
        asyncio.create_task(world.beat()),
        asyncio.create_task(service.act(Acting(redis, lease, clock))),
    ]
    try:
        yield world
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_idle_replicas_with_data_become_a_session_and_every_step_is_written_down(
    redis: Redis, tmp_path: Path
) -> None:
    async with launched(redis, tmp_path) as world:
        for i in range(3):
            await world.replica(f"r{i}", data={"chat": 100}, q=1.0 + i)
        opened = await world.event("session_opened")
    session = await sessions.read(redis, opened["session"])
    assert session is not None
    assert (session.clients, session.server, session.base) == (("r0", "r1", "r2"), "r2", "m")
    moves = [e for e in await world.events("state") if e["to"] == "idle"]
    assert {e["replica"] for e in moves} == {"r0", "r1", "r2"}
    for event in moves:
        for number in ("U=", "U_switch=", "b_switch=", "rest_carries=", "needed=", "T="):
            assert number in event["why"]


async def test_a_busy_cluster_stays_serving(redis: Redis, tmp_path: Path) -> None:
    async with launched(redis, tmp_path) as world:
        for i in range(3):
            await world.replica(f"r{i}", data={"chat": 100})
            world.load[f"r{i}"] = 0.9
        await world.replica("lazy", data={"chat": 100})
        await asyncio.sleep(0)
        waits = await world.event("session_waits")
        assert waits["adapter"] == "chat"
        for i in range(3):
            assert await world.state(f"r{i}") == "serving"


async def test_data_with_a_single_home_gets_a_session_that_one_client_keeps_open(
    redis: Redis, tmp_path: Path
) -> None:
    async with launched(redis, tmp_path, max_wait=0.3) as world:
        for i in range(3):
            await world.replica(f"r{i}", data={"chat": 100} if i == 1 else {})
        opened = await world.event("session_opened")
        session = await sessions.read(redis, opened["session"])
    assert session is not None
    assert session.clients == ("r1",)
    assert session.least == 1


async def test_a_dead_replica_is_not_counted(redis: Redis, tmp_path: Path) -> None:
    async with launched(redis, tmp_path) as world:
        for i in range(2):
            await world.replica(f"r{i}", "idle", data={"chat": 100})
        await world.replica("dead", "serving", data={"chat": 100})
        del world.load["dead"]  # no heartbeat
        opened = await world.event("session_opened")
        session = await sessions.read(redis, opened["session"])
    assert session is not None
    assert session.clients == ("r0", "r1")


async def test_data_that_sessions_have_learnt_from_starts_none(
    redis: Redis, tmp_path: Path
) -> None:
    registry = AdapterRegistry(redis, tmp_path)
    await registry.register("chat", base="m", rank=8)
    await registry.set_trained("chat", {"r0": 100, "r1": 95, "r2": 100})
    async with launched(redis, tmp_path) as world:
        for i in range(3):
            await world.replica(f"r{i}", "idle", data={"chat": 100})
        await world.replica("r3", "idle", data={"other": 10})
        await world.event("session_waits")  # of "other", in a tick that looked at "chat" too
        assert await world.events("session_opened") == []
        await registry.set_trained("chat", {"r0": 100, "r1": 50, "r2": 100})
        assert (await world.event("session_opened"))["adapter"] == "chat"


@pytest.mark.parametrize("losses", [(3.0, 2.0, 1.999, 1.998)])
async def test_a_converged_client_is_wished_out_of_its_session(
    redis: Redis, tmp_path: Path, losses: tuple[float, ...]
) -> None:
    session = sessions.Session(
        id="chat-1",
        adapter="chat",
        base="m",
        clients=("r0", "r1", "r2"),
        server="r0",
        losses={"r1": losses},
        B={"r0": 4, "r1": 4, "r2": 4},
    )
    await sessions.open_session(redis, session)
    async with launched(redis, tmp_path) as world:
        for i in range(3):
            await world.replica(f"r{i}", "combined", data={"chat": 100}, B=4)
        await world.replica("r3", "idle", data={"chat": 100})
        left = await world.event("leave")
        joined = await world.event("join")
        wished = await sessions.wishes(redis, "chat-1")
    assert (left["replica"], joined["replica"]) == ("r1", "r3")
    assert "loss fell less" in left["why"]
    assert wished.leave.keys() == {"r1"}
    assert wished.join.keys() == {"r3"}


async def test_a_damaged_record_is_left_out_and_the_launcher_lives_on(
    redis: Redis, tmp_path: Path
) -> None:
    async with launched(redis, tmp_path) as world:
        await world.replica("bad", "idle")
        await redis.hset(names.replica("bad"), "data", "{nonsense")
        for i in range(3):
            await world.replica(f"r{i}", "idle", data={"chat": 100})
        assert (await world.event("session_opened"))["adapter"] == "chat"


async def test_a_session_record_survives_redis(redis: Redis) -> None:
    session = sessions.Session(
        id="chat-1",
        adapter="chat",
        base="m",
        clients=("r0",),
        server="r0",
        phase=sessions.Phase.TRAIN,
        losses={"r0": (1.0, 0.5)},
        loss=0.5,
        heldout={"r0": 1.25},
        B={"r0": 4},
        results={"r0": {"examples": 3}},
        created=0.0,
    )
    assert (
        sessions.Session.from_hash({k.encode(): v.encode() for k, v in session.to_hash().items()})
        == session
    )
    await sessions.open_session(redis, session)
    again = await sessions.read(redis, "chat-1")
    assert again is not None
    assert again.created > 0
    assert again.losses == session.losses
