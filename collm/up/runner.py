"""Runs the whole system: starts every part, keeps it alive, stops it in order."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import IO, Any

from redis.exceptions import RedisError

from collm.redis_server import NoRedis, RedisServer
from collm.up import lora, ready
from collm.up.child import Child, GivenUp
from collm.up.errors import UpError
from collm.up.plan import Plan
from collm.up.settings import UpSettings
from shared.redis_client import TRANSIENT, connect

Tell = Callable[[str], None]
OLDEST_REDIS = (6, 2)


def lock_data(data: Path) -> IO[str]:
    """Keep a second runner off the folder; held until closed. Raises UpError."""
    run = data / "run"
    run.mkdir(parents=True, exist_ok=True)
    lock = (run / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        lock.close()
        raise UpError(
            f"{data} is in use by another `collm up`; stop it or choose another --data-dir"
        ) from e
    return lock


def claim_port(host: str, port: int) -> int:
    """The port to listen on (any free one for 0). Raises UpError when it is taken."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise UpError(
                f"cannot listen on {host}:{port}: {e.strerror}; choose another --port"
            ) from e
        return int(s.getsockname()[1])


async def check_redis(url: str) -> None:
    """Whether an existing Redis answers and is new enough. Raises UpError."""
    try:
        client = connect(url)
    except ValueError as e:
        raise UpError(str(e)) from e
    shown = url.split("@")[-1]
    try:
        info = await client.info("server")
    except (*TRANSIENT, RedisError) as e:
        raise UpError(f"Redis at {shown} does not answer: {e}") from e
    finally:
        await client.aclose()
    version = str(info["redis_version"])
    if tuple(int(p) for p in version.split(".")[:2]) < OLDEST_REDIS:
        raise UpError(f"Redis at {shown} is {version}; 6.2 or newer is needed")


class Runner:
    """One system on this machine. ``run`` returns when it was asked to stop and has stopped."""

    def __init__(
        self,
        settings: UpSettings,
        plan: Plan,
        data: Path,
        *,
        redis: RedisServer | None,
        redis_url: str,
        admin_url: str | None = None,
        tell: Tell,
    ) -> None:
        """``admin_url``: where the gateway's admin routes answer, if not at ``url``."""
        self._admin_url = admin_url
        self._settings, self._plan, self._data = settings, plan, data
        self._redis, self._redis_url, self._tell = redis, redis_url, tell
        self._stop = asyncio.Event()
        self._children = {
            part.name: Child(
                part.name,
                [sys.executable, "-m", part.module],
                data / "logs" / f"{part.name}.log",
                part.environment,
                tell=tell,
                restarts=settings.restarts,
                started=self._write_facts,
                may_leave=part.module == "services.replica",
            )
            for part in plan.parts
        }

    @property
    def url(self) -> str:
        """Where clients reach the gateway."""
        host = self._settings.host
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self._settings.port}"

    def facts(self) -> dict[str, object]:
        """What a script needs to know about the running system."""
        pids = {name: child.pid for name, child in self._children.items()}
        if self._redis is not None:
            pids = {"redis": self._redis.pid, **pids}
        admin = {} if self._admin_url is None else {"admin_url": self._admin_url}
        return {
            "url": self.url,
            **admin,
            "redis": self._redis_url,
            "data_dir": str(self._data),
            "pids": pids,
        }

    async def run(self, on_ready: Callable[[dict[str, object]], None]) -> None:
        """Start, wait until requests are answered, say so, go on until stopped.

        Raises UpError when a vital part cannot live or nothing answers in time; everything is
        stopped before that.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._asked_to_stop)
        keepers: list[asyncio.Task[None]] = []
        try:
            for child in self._children.values():
                await child.start()
            self._write_facts()
            keepers = [asyncio.create_task(self._keep(p.name, p.vital)) for p in self._plan.parts]
            if self._redis is not None:
                keepers.append(asyncio.create_task(self._keep_redis(self._redis)))
            await self._until_ready(keepers)
            if not self._stop.is_set():
                admin, modules = self._admin_url or self.url, self._settings.lora_modules
                await lora.load(admin, modules, self._data, self._tell)
                on_ready(self.facts())
            await self._first(keepers, self._stop.wait())
        finally:
            await self._shut_down(keepers)

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            self._tell("killing everything")
            for child in self._children.values():
                child.kill()
            return
        self._tell("stopping (once more to kill)")
        self._stop.set()

    async def _until_ready(self, keepers: list[asyncio.Task[None]]) -> None:
        models = [s.name for s in self._plan.served]
        probe = ready.answers(self.url, models, self._settings.ready_timeout, self._tell)
        try:
            await self._first(keepers, probe, self._stop.wait())
        except ready.NotReady as e:
            logs = "\n".join(
                f"--- {c.log}\n{c.tail(5)}" for c in self._children.values() if c.tail(5)
            )
            raise UpError(f"{e}\n{logs}") from e

    async def _first(
        self, keepers: list[asyncio.Task[None]], *awaited: Coroutine[Any, Any, object]
    ) -> None:
        """Wait for the first of ``awaited``; an error of a keeper or of that one is raised."""
        tasks = [asyncio.create_task(a) for a in awaited]
        try:
            done, _ = await asyncio.wait([*keepers, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, vital: bool) -> None:
        try:
            await self._children[name].keep()
            await self._stop.wait()
        except GivenUp as e:
            replicas = [p for p in self._plan.parts if p.module == "services.replica"]
            alone = all(self._children[p.name].pid is None for p in replicas)
            if vital or alone:
                raise UpError(str(e)) from e
            self._tell(f"{e}\n{name} stays away; the rest goes on")
            await self._stop.wait()

    async def _keep_redis(self, server: RedisServer) -> None:
        """Restart our own Redis when it dies; its append-only file brings everything back."""
        for _ in range(self._settings.restarts + 1):
            code = await asyncio.to_thread(server.wait)
            if self._stop.is_set():
                return
            self._tell(f"redis died (code {code}); restarting it on the same port")
            await asyncio.sleep(0.25)
            try:
                server.start()
            except NoRedis as e:
                raise UpError(str(e)) from e
            self._write_facts()
        raise UpError(f"Redis died {self._settings.restarts + 1} times; see {server.folder}")

    def _write_facts(self) -> None:
        """For `collm queues` and the like: where the running system is."""
        path = self._data / "run" / "up.json"
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(self.facts()) + "\n", encoding="utf-8")
        scratch.replace(path)

    async def _shut_down(self, keepers: list[asyncio.Task[None]]) -> None:
        """Gateway first (it drains), replicas last, then Redis."""
        self._stop.set()
        patience = self._settings.stop_timeout
        for group in self._plan.stops():
            if group:
                await asyncio.gather(*(self._children[n].stop(patience) for n in group))
        (self._data / "run" / "up.json").unlink(missing_ok=True)
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop, patience)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
