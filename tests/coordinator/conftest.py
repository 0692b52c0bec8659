"""A cluster of model-less replica processes and a coordinator in this process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from services.coordinator.meters import Meters
from services.coordinator.service import CoordinatorService
from services.coordinator.settings import CoordinatorSettings
from shared import names, sessions
from shared.adapters import AdapterRegistry
from shared.clock import RedisClock
from shared.leader import Acting
from shared.lease import Lease
from shared.replica_state import State, move
from shared.sessions import Session

REPLICAS = ("r0", "r1", "r2")
TRAINING: dict[str, Any] = {"local_steps": 2, "max_rounds": 2, "lora_alpha": 8.0, "rank": 4}


class Processes:
    """Replica processes that outlive a test; one that a test has killed is started again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def ensure(self) -> None:
        for name in REPLICAS:
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                command = [sys.executable, "-m", "tests.coordinator.replica_process"]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                self._processes[name] = subprocess.Popen(
                    [*command, self._url, name], env=environment
                )

    def kill(self, replica: str) -> None:
        self._processes[replica].kill()
        self._processes[replica].wait()

    def stop(self) -> None:
        for name in self._processes:
            self.kill(name)


class Fleet:
    """The replicas as a test sees them: what they do wrong, and waiting for what happens."""

    def __init__(self, url: str, redis: Redis, data_dir: Path) -> None:
        self.url, self.redis, self.data_dir = url, redis, data_dir
        self.registry = AdapterRegistry(redis, data_dir)

    async def ready(self) -> None:
        await self.redis.set("test:data", str(self.data_dir))
        for name in REPLICAS:
            await self.until(lambda n=name: self.redis.exists(names.replica_alive(n)))
            await self.until(lambda n=name: self.redis.exists(names.replica(n)))

    async def wrong(self, replica: str, **what: str | int) -> None:
        await self.redis.hset(f"test:{replica}", mapping={k: str(v) for k, v in what.items()})

    async def right(self, replica: str) -> None:
        await self.redis.delete(f"test:{replica}")

    async def state(self, replica: str) -> str:
        raw = await self.redis.hget(names.replica(replica), "state")
        return raw.decode() if raw else ""

    async def idle(self, replica: str) -> None:
        await move(self.redis, replica, State.IDLE, by="test", why="test")

    async def open(self, *clients: str, least: int = 2, **changes: Any) -> str:
        session = Session(
            id=sessions.new_id("chat"),
            adapter="chat",
            base="m",
            clients=clients,
            server=clients[0],
            least=least,
            **changes,
        )
        return await sessions.open_session(self.redis, session)

    async def events(self, kind: str) -> list[dict[str, str]]:
        found = []
        for _, fields in await self.redis.xrange(names.EVENTS):
            plain = {k.decode(): v.decode() for k, v in fields.items()}
            if plain["kind"] == kind:
                found.append(plain)
        return found

    async def event(self, kind: str, count: int = 1, timeout: float = 180.0) -> dict[str, str]:
        """The ``count``-th event of a kind, once it is there."""

        async def there() -> bool:
            return len(await self.events(kind)) >= count

        try:
            await self.until(there, timeout)
        except TimeoutError:
            entries = await self.redis.xrange(names.EVENTS)
            pytest.fail(f"no {kind} event within {timeout} s; there are: {entries}")
        return (await self.events(kind))[count - 1]

    async def until(self, check: Callable[[], Awaitable[Any]], timeout: float = 180.0) -> None:
        async with asyncio.timeout(timeout):
            while True:
                if await check():
                    return
                await asyncio.sleep(0.02)


class Coordinators:
    """Starts and stops coordinators in this process, as a lease would."""

    def __init__(self, url: str, redis: Redis, data_dir: Path) -> None:
        self._url, self._redis, self._data_dir = url, redis, data_dir
        self._tasks: list[asyncio.Task[None]] = []
        self.meters = Meters()  # of the last one started

    async def start(self, **changes: Any) -> asyncio.Task[None]:
        values: dict[str, Any] = {
            "redis_url": self._url,
            "data_dir": self._data_dir,
            "training": TRAINING,
            "round_seconds": 20.0,
            "round_least": 2.0,
            "grace": 1.0,
            "job_seconds": 15.0,
            "refit_seconds": 0.5,
            "exchange_timeout": 3.0,
        }
        settings = CoordinatorSettings.model_validate({**values, **changes})
        lease = Lease(self._redis, "coordinator")
        assert await lease.try_acquire()
        clock = RedisClock()
        await clock.synchronise(self._redis)
        self.meters = Meters()
        service = CoordinatorService(settings, self.meters)
        task = asyncio.create_task(service.act(Acting(self._redis, lease, clock)))
        self._tasks.append(task)
        return task

    async def stop(self, task: asyncio.Task[None]) -> None:
        """The process is gone: its lease is free for the next."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._redis.delete(names.lease("coordinator"))

    def forget(self, task: asyncio.Task[None]) -> None:
        """The test expects its error."""
        self._tasks.remove(task)

    async def stop_all(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # an error of the coordinator is the test's
            await self.stop(task)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of these tests' own: their replica processes beat on, whoever runs next."""
    server = RedisServer(tmp_path_factory.mktemp("redis-coordinator"), append_only=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def processes(redis_server: RedisServer) -> Iterator[Processes]:
    made = Processes(redis_server.url)
    yield made
    made.stop()


@pytest.fixture
async def coordinators(
    redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> AsyncIterator[Coordinators]:
    made = Coordinators(redis_server.url, redis, tmp_path)
    yield made
    await made.stop_all()


@pytest.fixture
async def cluster(
    processes: Processes, redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> Fleet:
    """Three Idle replicas with data."""
    processes.ensure()
    fleet = Fleet(redis_server.url, redis, tmp_path)
    await fleet.ready()
    return fleet
