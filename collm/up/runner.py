"""Runs the whole system: starts every part, keeps it alive, stops it in order."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from collm.redis_server import NoRedis, RedisServer
from collm.up import lora, ready
from collm.up.again import asked_back
from collm.up.child import Child, GivenUp
from collm.up.claims import address
from collm.up.errors import UpError
from collm.up.listeners import port_of
from collm.up.logfile import rotate
from collm.up.plan import Plan
from collm.up.settings import UpSettings

Tell = Callable[[str], None]
UPKEEP_SECONDS = 1.0  # between two looks at the logs and the ports


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
        self._parts = {part.name: part for part in plan.parts}
        self._replicas = {p.name for p in plan.parts if p.module == "services.replica"}
        self._ports: dict[int, int] = {}  # pid -> where it listens
        self._written = ""  # the facts as they are in up.json
        self._children = {
            part.name: Child(
                part.name,
                [sys.executable, "-m", part.module],
                data / "logs" / f"{part.name}.log",
                part.environment,
                tell=tell,
                restarts=settings.restarts,
                started=self._write_facts,
                may_leave=part.name in self._replicas,
            )
            for part in plan.parts
        }

    @property
    def url(self) -> str:
        """Where clients reach the gateway."""
        return address(self._settings.host, self._settings.port)

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
            "metrics": self._metrics(),
        }

    def _metrics(self) -> dict[str, str]:
        """Part -> its /metrics page; a part that does not listen yet is missing."""
        found = {"gateway": f"{self.url}/metrics"}
        for name, child in self._children.items():
            port = self._ports.get(child.pid) if child.pid is not None else None
            if name != "gateway" and port is not None:
                found[name] = f"{address(self._parts[name].host, port)}/metrics"
        return found

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
            keepers.append(asyncio.create_task(self._upkeep()))
            if self._redis is not None:
                keepers.append(asyncio.create_task(self._keep_redis(self._redis)))
            await self._until_ready(keepers)
            if not self._stop.is_set():
                admin, modules = self._admin_url or self.url, self._settings.lora_modules
                await lora.load(admin, modules, self._data, self._tell)
                self._see_ports()
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
        child = self._children[name]
        while not self._stop.is_set():
            try:
                await child.keep()
            except GivenUp as e:
                if vital or all(self._children[r].pid is None for r in self._replicas):
                    raise UpError(str(e)) from e
                again = f"; `collm undrain {name}` tries again" if name in self._replicas else ""
                self._tell(f"{e}\n{name} stays away; the rest goes on{again}")
            if not self._stop.is_set():
                await self._until_wanted(name)
                await child.revive()

    async def _until_wanted(self, name: str) -> None:
        """Return when the replica is asked back, or at the end."""
        waits: list[Coroutine[Any, Any, object]] = [self._stop.wait()]
        if name in self._replicas:
            waits.append(asked_back(self._redis_url, name))
        await self._first([], *waits)
        if not self._stop.is_set():
            self._tell(f"{name} is wanted again; starting it")

    async def _upkeep(self) -> None:
        """Keep logs short, and up.json true: a port is known only when its process listens."""
        logs = [child.log for child in self._children.values()]
        logs += [self._redis.log] if self._redis is not None else []
        told = False
        while not self._stop.is_set():
            self._see_ports()
            try:
                await asyncio.to_thread(lambda: [rotate(log) for log in logs])
            except OSError as e:
                if not told:
                    self._tell(f"a log is not cut short: {e}")
                told = True
            await asyncio.sleep(UPKEEP_SECONDS)

    def _see_ports(self) -> None:
        """Look up the port of each process that has none yet; write what is new."""
        for name, child in self._children.items():
            if child.pid is None or name == "gateway" or child.pid in self._ports:
                continue
            if (port := port_of(child.pid)) is not None:
                self._ports[child.pid] = port
        self._write_facts()

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
        facts = json.dumps(self.facts()) + "\n"
        if facts == self._written or self._stop.is_set():
            return
        path = self._data / "run" / "up.json"
        scratch = path.with_suffix(".new")
        scratch.write_text(facts, encoding="utf-8")
        scratch.replace(path)
        self._written = facts

    async def _shut_down(self, keepers: list[asyncio.Task[None]]) -> None:
        """Gateway first (it drains), replicas last, then Redis."""
        self._stop.set()
        for group in self._plan.stops():
            stops = (self._children[n].stop(self._parts[n].patience) for n in group)
            await asyncio.gather(*stops)
        (self._data / "run" / "up.json").unlink(missing_ok=True)
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop, self._settings.stop_timeout)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
