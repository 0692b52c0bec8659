"""One campaign: start the system, load it, hurt it every few seconds, judge, report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared import names, sessions
from shared.adapter_files import read_card
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.redis_client import TRANSIENT, connect, patiently
from tests import tiny
from tests.chaos import faults, model
from tests.chaos.clock import NoCompiler, SteppedClock
from tests.chaos.judge import Verdict, adapters_load, judge
from tests.chaos.load import Load
from tests.system.running import System, gone

CALM_SECONDS = 45.0  # to drain after the last fault
RECOVERY_LIMIT = 60.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. Seconds."""

    seconds: float
    every: float = 5.0
    seed: int = 1
    workers: int = 6
    replicas: int = 3
    train: bool = True
    kinds: tuple[str, ...] = tuple(faults.KINDS)


class Campaign:
    """``run`` returns the report: plain data, JSON-ready."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._dice = random.Random(plan.seed)
        self._done: dict[str, int] = defaultdict(int)
        self._missed: dict[str, str] = {}
        self._recovery: dict[str, list[float]] = defaultdict(list)
        self._taken_over: list[float] = []
        self._gateway_deaths: list[float] = []
        self._memory: list[dict[str, float]] = []
        self._keys: list[int] = []
        self._clock: SteppedClock | None = None
        self._published, self._illegal = 0, list[str]()

    def run(self) -> dict[str, Any]:
        self._clock = self._stepped_clock()
        checkpoint = model.write(self._folder / model.MODEL)
        adapters = {
            name: tiny.write_adapter(checkpoint, self._folder / "source" / name, seed=seed)
            for seed, name in enumerate(model.ADAPTERS, start=1)
        }
        with self._disk() as disk:
            with self._started(checkpoint) as system:
                load, folders = asyncio.run(self._attack(system, adapters, disk))
                processes = system.descendants()
                system.stop(seconds=90.0)
                left = [p.pid for p in gone(processes)]
            golden = model.Golden(checkpoint)
            verdict = judge(load.records, golden, folders, self._gateway_deaths)
            verdict.details += adapters_load(golden, folders) + self._illegal
            golden.close()
        return self._report(verdict, left)

    # ------------------------------------------------------------ start

    @contextlib.contextmanager
    def _disk(self) -> Iterator[Path | None]:
        """A small file system for the adapters, where this user may mount one."""
        target = self._folder / "data" / "adapters"
        target.mkdir(parents=True)
        mounted = False
        if os.geteuid() == 0 and shutil.which("mount"):
            command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(target)]
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield target if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(target)], check=True)

    def _stepped_clock(self) -> SteppedClock | None:
        try:
            return SteppedClock(self._folder)
        except NoCompiler as e:
            self._missed["clock_step"] = str(e)
            return None

    @contextlib.contextmanager
    def _started(self, checkpoint: Path) -> Iterator[System]:
        variables = {
            "COLLM_REPLICA_DTYPE": "float32",
            "COLLM_REPLICA_THREADS": "1",
            "COLLM_REPLICA_KV_TOKENS": "8192",
            "COLLM_UP_RESTARTS": "1000",
            "COLLM_REPLICA_RESTARTS": "1000",
            "COLLM_GATEWAY_MAX_ATTEMPTS": "10",
            # Replicas count as idle however busy they are: a session goes on through it all.
            "COLLM_LAUNCHER_IDLE_RULE": "paper",
            "COLLM_LAUNCHER_WINDOW": "3",
            "COLLM_LAUNCHER_WINDOW_MIN": "3",
            "COLLM_LAUNCHER_UTILISATION_FLOOR": "1.0",
            "COLLM_LAUNCHER_QUEUE_FLOOR": "10000",
            "COLLM_LAUNCHER_B_FLOOR": "10000",
            "COLLM_COORDINATOR_TRAINING": json.dumps(
                {"local_steps": 1, "accumulation": 2, "micro_batch": 2, "max_rounds": 100_000}
            ),
        }
        if self._clock is not None:
            variables |= self._clock.variables
        options = ["--model", f"{checkpoint}:{self._plan.replicas}"]
        options += ["--served-model-name", model.MODEL]
        if not self._plan.train:
            options.append("--no-train")
        with System(self._folder / "data", *options, variables=variables) as system:
            yield system

    async def _register(self, redis: Redis, system: System, adapters: dict[str, Path]) -> None:
        """As `collm adapters add` does it."""
        registry = AdapterRegistry(redis, system.data)
        for name, source in adapters.items():
            target = registry.folder(name, "v1")
            await asyncio.to_thread(shutil.copytree, source, target)
            card = read_card(target)
            await registry.register(
                name, base=model.MODEL, rank=card.rank, lora_alpha=card.lora_alpha, source="load"
            )
            await registry.publish(name, AdapterVersion(version="v1", path=str(target)))
        async with httpx.AsyncClient(base_url=system.url) as client:
            for name in adapters:
                body = {"model": name, "prompt": [40], "max_tokens": 1}
                await _answered(client, body, 60.0)

    def _give_data(self, system: System) -> None:
        """Each replica gets chats of its own, by the command that a person would use."""
        for i in range(self._plan.replicas):
            file = self._folder / f"domain-{i}.jsonl"
            file.write_text("\n".join(model.training_lines(f"domain {i}", 40)))
            command = [sys.executable, "-m", "collm", "data", "add", str(file)]
            command += ["--adapter", model.LEARNER, "--replica", f"replica-{i}"]
            command += ["--data-dir", str(system.data)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)

    # ------------------------------------------------------------ attack

    async def _attack(
        self, system: System, adapters: dict[str, Path], disk: Path | None
    ) -> tuple[Load, dict[tuple[str, str], str]]:
        redis = connect(system.redis_url)
        await self._register(redis, system, adapters)
        if self._plan.train:
            await asyncio.to_thread(self._give_data, system)
        bad = self._folder / "bad-adapter"
        bad.mkdir()
        (bad / "adapter_config.json").write_text('{"r": "many"}')
        (bad / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
        arena = faults.Arena(system, redis, self._dice, bad, disk, self._clock)
        load = Load(
            system.url,
            (model.MODEL, *adapters, *([model.LEARNER] if self._plan.train else [])),
            workers=self._plan.workers,
            seed=self._plan.seed,
        )
        running = asyncio.create_task(load.run())
        try:
            await self._hurt(arena)
        finally:
            load.stop()
            await running
        await asyncio.to_thread(system.await_drained, CALM_SECONDS)
        # The last fault may have cut this very connection.
        self._keys.append(await patiently(redis.dbsize, "counting keys", give_up_after=30))
        folders = await _folders(redis, system)
        self._published, self._illegal = await _rounds(redis)
        await redis.aclose()
        return load, folders

    async def _hurt(self, arena: faults.Arena) -> None:
        """Every kind in turn, in shuffled rounds, until the time is over."""
        self._keys.append(int(await arena.redis.dbsize()))
        end = time.monotonic() + self._plan.seconds
        pending: list[str] = []
        async with httpx.AsyncClient(base_url=arena.system.url) as client:
            while time.monotonic() < end:
                if not pending:
                    pending = list(self._plan.kinds)
                    self._dice.shuffle(pending)
                    self._memory.append(await asyncio.to_thread(_memory, arena.system))
                next_at = time.monotonic() + self._dice.uniform(0.6, 1.4) * self._plan.every
                await self._one(pending.pop(), arena, client)
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def _one(self, kind: str, arena: faults.Arena, client: httpx.AsyncClient) -> None:
        started = time.monotonic()
        before = await _redis_now(arena.redis)
        try:
            what = await faults.KINDS[kind](arena)
        except faults.NothingToHit as e:
            self._missed[kind] = str(e)
            return
        except (*TRANSIENT, RedisError) as e:
            self._missed[kind] = f"Redis was away: {e}"
            return
        if kind == "kill_gateway":
            self._gateway_deaths.append(started)
        self._done[kind] += 1
        self._recovery[kind].append(await _answered(client, PROBE, RECOVERY_LIMIT))
        if kind == "kill_replica" and before is not None:
            took = await _released_elsewhere(arena.redis, what, before)
            if took is not None:
                self._taken_over.append(took)

    # ------------------------------------------------------------ report

    def _report(self, verdict: Verdict, left: list[int]) -> dict[str, Any]:
        recovery = {
            kind: {"median": round(median(times), 2), "max": round(max(times), 2)}
            for kind, times in sorted(self._recovery.items())
        }
        if self._taken_over:
            recovery["replica_death_to_release_elsewhere"] = {
                "median": round(median(self._taken_over), 2),
                "max": round(max(self._taken_over), 2),
            }
        return {
            "chaos": "ok" if not (verdict.details or left) else "violated",
            "minutes": round(self._plan.seconds / 60, 2),
            "faults": dict(sorted(self._done.items())),
            "requests": verdict.requests,
            "lost": verdict.lost,
            "duplicated": verdict.duplicated,
            "wrong": verdict.wrong,
            "recovery_s": recovery,
            "outcomes": dict(verdict.outcomes),
            "unverified": verdict.unverified,
            "rounds": self._published,
            "errors": dict(verdict.errors.most_common(12)),
            "not_done": {k: v for k, v in self._missed.items() if k not in self._done},
            "processes_left": left,
            "keys": self._keys,
            "memory_mb": {"first": self._memory[0], "last": self._memory[-1]},
            "violations": verdict.details[:50],
        }


PROBE = {"model": model.MODEL, "prompt": [50, 51], "max_tokens": 2, "temperature": 0}


async def _answered(client: httpx.AsyncClient, body: dict[str, Any], limit: float) -> float:
    """Seconds until this request is answered, trying again while it is not."""
    started = time.monotonic()
    while time.monotonic() - started < limit:
        with contextlib.suppress(httpx.TransportError):
            response = await client.post("/v1/completions", json=body, timeout=limit)
            if response.status_code == 200:
                return time.monotonic() - started
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing was answered for {limit:.0f} s: {body}")


async def _redis_now(redis: Redis) -> float | None:
    try:
        seconds, micros = await redis.time()
    except TRANSIENT:
        return None
    return float(seconds) + micros / 1e6


async def _released_elsewhere(redis: Redis, replica: str, since: float) -> float | None:
    """Redis seconds from ``since`` to the first release of a second attempt; None: there was
    nothing on the replica."""
    try:
        async for when, requests in _decisions(redis, since):
            if any(int(key.rpartition("/")[2]) > 1 for key in requests.split()):
                return when - since
    except (*TRANSIENT, RedisError):
        return None  # Redis was the next victim
    return None


async def _decisions(redis: Redis, since: float) -> AsyncIterator[tuple[float, str]]:
    """Releases since then, for as long as a lost heartbeat takes to be noticed and some more."""
    last, end = f"{int(since * 1000)}-0", time.monotonic() + 6.0
    while time.monotonic() < end:
        for _, entries in await redis.xread({names.DECISIONS: last}, count=200, block=200):
            for entry, fields in entries:
                last = entry.decode()
                if b"replica" in fields:  # no refusal
                    yield int(last.split("-")[0]) / 1e3, fields[b"requests"].decode()


async def _folders(redis: Redis, system: System) -> dict[tuple[str, str], str]:
    """(adapter, version) -> PEFT folder: what is registered, and what replicas published of
    their own between rounds."""
    registry = AdapterRegistry(redis, system.data)
    found = {
        (path.parent.name, path.name): str(path)
        for path in (system.data / "adapters").glob("*/*")
        if (path / "adapter_model.safetensors").exists()
    }
    for adapter in await registry.all():
        for version in await registry.versions(adapter.name):
            found[adapter.name, version.version] = version.path
    return found


async def _rounds(redis: Redis) -> tuple[int, list[str]]:
    """Rounds that ended with a version, and complaints about sessions in no legal phase."""
    complaints = []
    for raw in await redis.smembers(names.SESSIONS):
        session = await sessions.read(redis, raw.decode())
        if session is None:
            complaints.append(f"session {raw.decode()} is listed and has no record")
    published = 0
    for _, fields in await redis.xrange(names.EVENTS):
        learnt = fields.get(b"adapter") == model.LEARNER.encode()
        published += learnt and fields.get(b"kind") in (b"adapter_published", b"adapter_kept")
    return published, complaints


def _memory(system: System) -> dict[str, float]:
    import psutil

    found = {}
    for name, pid in system.pids().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            members = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            found[name] = round(sum(m.memory_full_info().uss for m in members) / 1e6, 1)
    return found
