"""What is done to the system, one function a kind. Each returns when it has been done and, where
it is a condition that lasts (stopped, full), undone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from redis.asyncio import Redis

from shared import names
from shared.messages import BODY, LoadAdapter, encode
from tests.chaos.clock import SteppedClock
from tests.chaos.model import MODEL
from tests.system.running import System

STOP_SECONDS = 4.5  # longer than the heartbeat's time to live
PAUSE_MS = 2500


@dataclass
class Arena:
    """Everything a fault may touch."""

    system: System
    redis: Redis
    dice: random.Random
    bad_adapter: Path
    adapter_disk: Path | None  # a file system of its own, or None where it cannot be had
    clock: SteppedClock | None  # of all services; None where it cannot be built


Fault = Callable[[Arena], Awaitable[str]]


class NothingToHit(RuntimeError):
    """The target is not there at the moment (it is being restarted)."""


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError as e:
        raise NothingToHit(f"pid {pid}") from e


def _pid(arena: Arena, part: str) -> int:
    pid = arena.system.pids().get(part)
    if pid is None or not psutil.pid_exists(pid):
        raise NothingToHit(part)
    return pid


def _replica(arena: Arena) -> str:
    return arena.dice.choice([p for p in arena.system.pids() if p.startswith("replica-")])


def _child(arena: Arena, role: str) -> tuple[str, int]:
    """Inference or training process of some replica; training is the one that is nicer."""
    name = _replica(arena)
    parent = psutil.Process(_pid(arena, name))
    for process in parent.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" in " ".join(process.cmdline()):
                continue
            if (process.nice() > parent.nice()) == (role == "training"):
                return name, process.pid
    raise NothingToHit(f"{name}'s {role} process")


def kill(part: str) -> Fault:
    async def fault(arena: Arena) -> str:
        _signal(_pid(arena, part), signal.SIGKILL)
        return part

    return fault


async def kill_replica(arena: Arena) -> str:
    name = _replica(arena)
    _signal(_pid(arena, name), signal.SIGKILL)
    return name


def kill_child(role: str) -> Fault:
    async def fault(arena: Arena) -> str:
        name, pid = _child(arena, role)
        _signal(pid, signal.SIGKILL)
        return f"{name} {role}"

    return fault


@contextlib.contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def stop_replica(arena: Arena) -> str:
    """The whole replica stands still for longer than its heartbeat lives, then goes on."""
    name = _replica(arena)
    pid = _pid(arena, name)
    members = [pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))]
    with _stopped(members):
        await asyncio.sleep(STOP_SECONDS)
    return name


async def stop_dispatcher(arena: Arena) -> str:
    """It wakes up without its lease and must not act on what it believed."""
    with _stopped([_pid(arena, "dispatcher")]):
        await asyncio.sleep(STOP_SECONDS)
    return "dispatcher"


async def stop_redis(arena: Arena) -> str:
    with _stopped([_pid(arena, "redis")]):
        await asyncio.sleep(PAUSE_MS / 1e3)
    return "redis"


async def pause_redis(arena: Arena) -> str:
    await arena.redis.execute_command("CLIENT", "PAUSE", PAUSE_MS)
    return "redis"


async def cut_connections(arena: Arena) -> str:
    """Every client connection but ours."""
    await arena.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    return "all connections"


async def fill_disk(arena: Arena) -> str:
    """No room for adapters for some seconds."""
    if arena.adapter_disk is None:
        raise NothingToHit("adapters have no file system of their own here")
    ballast = arena.adapter_disk / "ballast"
    room = os.statvfs(arena.adapter_disk)
    try:
        with contextlib.suppress(OSError), ballast.open("wb") as out:
            out.write(bytes(room.f_bavail * room.f_frsize + (1 << 20)))
        await asyncio.sleep(3.0)
    finally:
        ballast.unlink(missing_ok=True)
    return "adapters"


async def poison(arena: Arena) -> str:
    """Rubbish in some stream, by the command that redis-cli would send."""
    pids = arena.system.pids()
    replica = _replica(arena)
    gateways = sorted(g.decode() for g in await arena.redis.smembers(names.GATEWAYS))
    streams = [
        names.requests(MODEL),
        names.dispatcher_control(MODEL),
        names.batches(replica),
        names.control(replica),
        names.METRICS,
        names.EVENTS,
        names.COORDINATOR_CONTROL,
        *(names.replies(g) for g in gateways),
    ]
    assert pids, "the system has parts"
    stream = arena.dice.choice(streams)
    rubbish = arena.dice.randbytes(arena.dice.randrange(1, 200))
    fields: dict[bytes, bytes] = arena.dice.choice(
        [
            {BODY: rubbish},
            {b"garbage": rubbish},
            {b"id": rubbish, b"attempt": b"many", BODY: rubbish},
            {rubbish: rubbish},
        ]
    )
    await arena.redis.xadd(stream, fields, nomkstream=True)
    return stream


async def malformed_adapter(arena: Arena) -> str:
    """A replica is told to load what is no adapter."""
    replica = _replica(arena)
    command = LoadAdapter(name="broken", version="v1", path=str(arena.bad_adapter))
    await arena.redis.xadd(
        names.control(replica), {"kind": "load_adapter", BODY: encode(command)}, nomkstream=True
    )
    return replica


async def clock_step(arena: Arena) -> str:
    """The wall clock of all services jumps by an hour, and back after some seconds."""
    if arena.clock is None:
        raise NothingToHit("no C compiler here")
    step = arena.dice.choice((3600, -3600))
    arena.clock.step(step)
    try:
        await asyncio.sleep(4.0)
    finally:
        arena.clock.step(0)
    return f"{step:+d} s"


KINDS: dict[str, Fault] = {
    "kill_gateway": kill("gateway"),
    "kill_dispatcher": kill("dispatcher"),
    "kill_launcher": kill("launcher"),
    "kill_coordinator": kill("coordinator"),
    "kill_redis": kill("redis"),
    "kill_replica": kill_replica,
    "kill_inference": kill_child("inference"),
    "kill_training": kill_child("training"),
    "stop_replica": stop_replica,
    "stop_dispatcher": stop_dispatcher,
    "stop_redis": stop_redis,
    "pause_redis": pause_redis,
    "cut_connections": cut_connections,
    "fill_disk": fill_disk,
    "poison": poison,
    "malformed_adapter": malformed_adapter,
    "clock_step": clock_step,
}
