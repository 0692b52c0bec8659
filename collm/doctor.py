"""Checks of this machine and of the running system; each says how to mend what it finds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from collm import models
from collm.redis_server import NoRedis, find_binary
from shared import mps, names
from shared.records import HEARTBEAT_TTL_MS
from shared.redis_client import TRANSIENT, connect

MIB = 1 << 20
SHM_BYTES = 1 << 30
DISK_BYTES = 5 << 30
SKEW_SECONDS = 0.5
OLDEST_REDIS = (6, 2)


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, but you may want to know
    BAD = "bad"  # something will not work


@dataclass(frozen=True)
class Finding:
    """One check's result; ``mend`` says what to do where it is not ok."""

    check: str
    level: Level
    found: str
    mend: str = ""


def machine(data: Path, host: str, port: int, *, redis_known: bool = False) -> Iterator[Finding]:
    """Everything that can be said without a running system; ``redis_known``: it has its Redis."""
    yield _memory()
    yield _disk(data)
    yield _shared_memory()
    yield _redis_binary(redis_known)
    yield _compiler()
    yield _port(host, port)
    yield from _packages()
    yield from _models()
    yield from _gpus()


def _memory() -> Finding:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{available / MIB:.0f} MiB free, {len(os.sched_getaffinity(0))} processors"
    if available < 2048 * MIB:
        return Finding(
            "memory", Level.NOTE, found, "a replica of the default model takes about 1.2 GiB"
        )
    return Finding("memory", Level.OK, found)


def _disk(data: Path) -> Finding:
    place = data
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / MIB:.0f} MiB free for {data}"
    if not os.access(place, os.W_OK):
        return Finding("disk", Level.BAD, f"{place} cannot be written", "choose --data-dir")
    if free < DISK_BYTES:
        return Finding("disk", Level.NOTE, found, "free some space or choose --data-dir")
    return Finding("disk", Level.OK, found)


def _shared_memory() -> Finding:
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    found = f"/dev/shm holds {size / MIB:.0f} MiB"
    if size < SHM_BYTES:
        return Finding(
            "shared memory",
            Level.NOTE,
            found,
            "on CPU nothing here needs it; for GPUs run containers with --shm-size=2g",
        )
    return Finding("shared memory", Level.OK, found)


def _redis_binary(redis_known: bool) -> Finding:
    try:
        return Finding("redis-server", Level.OK, find_binary())
    except NoRedis as e:
        if redis_known:
            mend = "only a `collm up` that starts a Redis of its own needs it"
            return Finding("redis-server", Level.NOTE, "none found", mend)
        return Finding("redis-server", Level.BAD, "none found", str(e))


def _compiler() -> Finding:
    for name in ("gcc", "cc", "clang"):
        if path := shutil.which(name):
            return Finding("compiler", Level.OK, path)
    return Finding(
        "compiler",
        Level.NOTE,
        "no C compiler",
        "the engine then runs without its own kernels, slower; on Debian: apt-get install gcc",
    )


def _port(host: str, port: int) -> Finding:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            return Finding(
                "port",
                Level.NOTE,
                f"{host}:{port}: {e.strerror}",
                "a system runs already, or choose another --port",
            )
    return Finding("port", Level.OK, f"{host}:{port} is free")


def _packages() -> Iterator[Finding]:
    for name in ("torch", "transformers", "peft"):
        try:
            yield Finding(name, Level.OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                name,
                Level.NOTE,
                "not installed",
                "replicas with the torch engine need it: pip install 'collm[replica]'",
            )


def _models() -> Iterator[Finding]:
    found = models.cached()
    if not found:
        yield Finding("models", Level.NOTE, f"none in {models.cache_folder()}", "collm models pull")
    for model in found:
        yield Finding("model", Level.OK, f"{model.name} ({model.size / MIB:.0f} MiB)")


def _gpus() -> Iterator[Finding]:
    """What NVML and the MPS daemon say; torch is not asked, it takes seconds to import."""
    if importlib.util.find_spec("pynvml") is None:
        yield Finding("GPU", Level.NOTE, "nvidia-ml-py is not installed", "only GPUs need it")
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        yield Finding("GPU", Level.NOTE, f"none ({e})", "replicas compute on the processor")
        return
    try:
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            text = f"{i}: {name}, {memory.free / MIB:.0f} of {memory.total / MIB:.0f} MiB free"
            yield Finding("GPU", Level.OK, text)
    finally:
        pynvml.nvmlShutdown()
    yield _mps()
    yield _nccl()


def _mps() -> Finding:
    place = mps.folder(os.environ)
    if mps.runs(os.environ):
        return Finding("MPS", Level.OK, f"its daemon meets clients in {place}")
    return Finding(
        "MPS",
        Level.NOTE,
        f"no daemon in {place}",
        "without it serving and training take turns on a GPU; with it training is held to "
        "replica.training_gpu_percent: nvidia-cuda-mps-control -d (containers: mount that folder, "
        "ipc: host)",
    )


def _nccl() -> Finding:
    names_found = [
        d.metadata["Name"]
        for d in importlib.metadata.distributions()
        if str(d.metadata["Name"]).startswith("nvidia-nccl")
    ]
    if names_found:
        return Finding("NCCL", Level.OK, names_found[0])
    return Finding(
        "NCCL", Level.NOTE, "no package of it", "adapters then travel through Redis; slower"
    )


# ---------------------------------------------------------------- the running system


async def system(url: str) -> list[Finding]:
    """Redis and what runs on it. An unreachable Redis is the only finding then."""
    async with connect(url) as redis:
        try:
            return await _system(redis)
        except (*TRANSIENT, RedisError) as e:
            shown = url.split("@")[-1]
            return [Finding("Redis", Level.BAD, f"{shown}: {e}", "start it, or give --redis")]


Check = Callable[[Redis], Awaitable[Finding]]


async def _system(redis: Redis) -> list[Finding]:
    checks: tuple[Check, ...] = (_version, _policy, _persistence, _skew, _lease, _replicas)
    return [await check(redis) for check in checks]


async def _version(redis: Redis) -> Finding:
    info = await redis.info("server")
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(p) for p in version.split(".")[:2]) < OLDEST_REDIS:
        return Finding("Redis version", Level.BAD, version, "6.2 or newer is needed")
    if info.get("redis_mode") == "cluster":
        return Finding(
            "Redis version",
            Level.BAD,
            f"{version} as a cluster",
            "Redis Cluster is not supported; use one primary, with Sentinel for availability",
        )
    return Finding("Redis version", Level.OK, version)


async def _policy(redis: Redis) -> Finding:
    policy = (await redis.info("memory")).get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        return Finding(
            "Redis eviction",
            Level.BAD,
            str(policy),
            "streams would vanish under memory pressure: CONFIG SET maxmemory-policy noeviction",
        )
    return Finding("Redis eviction", Level.OK, str(policy))


async def _persistence(redis: Redis) -> Finding:
    info = await redis.info("persistence")
    if not int(info.get("aof_enabled", 0)):
        return Finding(
            "Redis persistence",
            Level.NOTE,
            "append-only file off",
            "what is queued is lost when Redis restarts: CONFIG SET appendonly yes",
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return Finding(
            "Redis persistence",
            Level.BAD,
            "the last append failed",
            "look at Redis's log; is its disk full?",
        )
    return Finding("Redis persistence", Level.OK, "append-only file")


async def _skew(redis: Redis) -> Finding:
    before = time.time()
    seconds, micros = await redis.time()
    after = time.time()
    skew = seconds + micros / 1e6 - (before + after) / 2
    found = f"{skew * 1e3:+.0f} ms against Redis"
    if abs(skew) > SKEW_SECONDS + (after - before):
        return Finding(
            "clock", Level.NOTE, found, "harmless here (all use Redis time); logs will not line up"
        )
    return Finding("clock", Level.OK, found)


async def _lease(redis: Redis) -> Finding:
    holder = await redis.get(names.lease("dispatcher"))
    if holder is None:
        return Finding(
            "dispatcher", Level.BAD, "none holds the lease", "start one; requests wait until then"
        )
    return Finding("dispatcher", Level.OK, holder.decode(errors="replace"))


async def _replicas(redis: Redis) -> Finding:
    known = sorted(r.decode() for r in await redis.smembers(names.REPLICAS))
    dead = [r for r in known if not await redis.exists(names.replica_alive(r))]
    alive = len(known) - len(dead)
    if not alive:
        return Finding("replicas", Level.BAD, "none is alive", "start one; look at its log")
    if dead:
        return Finding(
            "replicas",
            Level.NOTE,
            f"{alive} alive; silent for {HEARTBEAT_TTL_MS / 1e3:.0f} s or more: {', '.join(dead)}",
            "start them again, or `collm forget` those that will not come back",
        )
    return Finding("replicas", Level.OK, f"{alive} alive")
