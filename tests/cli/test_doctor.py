"""`collm doctor` and `collm top` against a real Redis."""

from __future__ import annotations

import io
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from collm import doctor
from collm.cli import build
from collm.doctor import Level
from collm.redis_server import NoRedis, RedisServer
from shared import names
from shared.messages import BODY, StepSample, TrainSample, encode
from shared.records import ReplicaRecord
from shared.replica_state import event

run = CliRunner()


def _collm(*arguments: str) -> tuple[int, str]:
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(run.invoke, build(), arguments).result()
    return result.exit_code, result.stdout


async def _findings(redis_server: RedisServer) -> dict[str, doctor.Finding]:
    return {f.check: f for f in await doctor.system(redis_server.url)}


async def test_a_bad_eviction_policy_is_found_and_how_to_mend_it(
    redis: Redis, redis_server: RedisServer
) -> None:
    assert (await _findings(redis_server))["Redis eviction"].level is Level.OK
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        finding = (await _findings(redis_server))["Redis eviction"]
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    assert finding.level is Level.BAD
    assert "CONFIG SET maxmemory-policy noeviction" in finding.mend


def test_an_mps_daemon_is_looked_for_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    finding = doctor._mps()
    assert finding.level is Level.NOTE
    assert str(tmp_path) in finding.found
    assert "nvidia-cuda-mps-control -d" in finding.mend
    (tmp_path / "control").touch()
    assert doctor._mps().level is Level.OK


async def test_missing_dispatcher_and_dead_replicas_are_found(
    redis: Redis, redis_server: RedisServer
) -> None:
    found = await _findings(redis_server)
    assert (found["dispatcher"].level, found["replicas"].level) == (Level.BAD, Level.BAD)
    await redis.set(names.lease("dispatcher"), "one")
    await redis.sadd(names.REPLICAS, "replica-0", "replica-1")
    await redis.set(names.replica_alive("replica-0"), "x")
    found = await _findings(redis_server)
    assert found["dispatcher"].level is Level.OK
    assert found["replicas"].level is Level.NOTE
    assert "replica-1" in found["replicas"].found


async def test_an_unreachable_redis_is_a_finding_not_a_crash() -> None:
    (finding,) = await doctor.system("redis://127.0.0.1:1/0")
    assert finding.level is Level.BAD


def test_a_taken_port_is_noted(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = {f.check: f for f in doctor.machine(tmp_path, "127.0.0.1", port)}
    assert found["port"].level is Level.NOTE
    assert found["redis-server"].level is Level.OK


def test_a_missing_redis_server_is_bad_only_where_no_redis_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise NoRedis("no Redis: install one")

    monkeypatch.setattr(doctor, "find_binary", none)
    for known, level in ((False, Level.BAD), (True, Level.NOTE)):
        findings = doctor.machine(tmp_path, "127.0.0.1", 0, redis_known=known)
        found = {f.check: f for f in findings}["redis-server"]
        assert found.level is level
        assert found.mend


def test_doctor_ends_with_1_only_when_something_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = _collm("doctor", "--json", "--data-dir", str(tmp_path))
    levels = {f["level"] for f in json.loads(out)}
    assert code == (1 if "bad" in levels else 0)
    assert _collm("doctor", "--redis", "redis://127.0.0.1:1/0")[0] == 1


async def test_top_shows_replicas_rates_and_adapters(
    redis: Redis, redis_server: RedisServer
) -> None:
    record = ReplicaRecord(
        id="replica-0", model="m", b=8, in_flight=3, kv_total=100, kv_free=25, state="serving"
    )
    await redis.sadd(names.REPLICAS, "replica-0")
    await redis.hset(names.replica("replica-0"), mapping=record.to_hash())
    await redis.sadd(names.ADAPTERS, "law")
    await redis.hset(names.adapter("law"), mapping={"current": "r3", "quality": "0.75"})
    from collm.top import Watcher

    now = (await redis.time())[0]
    watcher = Watcher(redis, window=10.0)
    for seq, ago in enumerate((30.0, 3.0, 2.0, 1.0, 0.0)):
        sample = StepSample(
            replica="replica-0",
            model="m",
            incarnation="i",
            seq=seq,
            time=now - ago,
            seconds=0.02,
            steps=2,
            b=3,
            decode_tokens=50,
        )
        await redis.xadd(names.METRICS, {"kind": "step", BODY: encode(sample)})
        if seq == 2:
            await watcher.look()
    await redis.xadd(names.METRICS, {"kind": "step", BODY: b"broken"})
    await watcher.look()
    assert watcher.rate("replica-0") == 4 * 50 / 10.0, "what is older than the window is left out"
    assert watcher.step("replica-0") == 0.01
    code, out = _collm("top", "--once", "--redis", redis_server.url)
    assert code == 0
    assert "20 tokens/s" in out, "one look knows the seconds before it"
    assert "3/8" in out
    assert "75" in out, "KV memory used, per cent"
    assert "r3" in out
    assert "training" not in out


async def test_top_shows_how_far_training_is(redis: Redis, redis_server: RedisServer) -> None:
    now = (await redis.time())[0]
    for name in ("r0", "r1"):
        record = ReplicaRecord(id=name, model="m", state="combined", since=now - 60)
        await redis.sadd(names.REPLICAS, name)
        await redis.hset(names.replica(name), mapping=record.to_hash())
    for replica, step, time in (("r0", 3, now - 9), ("r0", 4, now - 5), ("r1", 8, now - 99)):
        sample = TrainSample(
            replica=replica,
            adapter="law",
            time=time,
            round=2,
            step=step,
            B=1,
            b=0,
            micro_seconds=0.75,
            loss=1.234,
        )
        await redis.xadd(names.METRICS, {"kind": "train", BODY: encode(sample)})
    code, out = _collm("top", "--once", "--redis", redis_server.url)
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.startswith("r0") and "law" in line]
    assert row.split()[:7] == ["r0", "law", "2", "4", "1", "1.234", "0.75"]
    (other,) = [line for line in out.splitlines() if "none yet" in line]
    assert other.startswith("r1"), "its sample is of a session before"


async def test_top_shows_when_each_event_was(redis: Redis, redis_server: RedisServer) -> None:
    await redis.xadd(names.EVENTS, {"kind": "old"}, id="1767225600000-0")  # 2026-01-01, midnight
    await event(redis, "new", number=7)
    code, out = _collm("top", "--once", "--redis", redis_server.url)
    assert code == 0
    (new,) = [line for line in out.splitlines() if "number=7" in line]
    (old,) = [line for line in out.splitlines() if line.rstrip().endswith("old")]
    assert re.fullmatch(r"(\S+ )?\d\d:\d\d:\d\d\.\d{3} new +number=7 *", new)
    assert re.fullmatch(r"202[56]-\d\d-\d\d \d\d:\d\d:00\.000 old *", old)


async def test_top_tells_replicas_apart_on_a_narrow_screen(
    redis: Redis, redis_server: RedisServer
) -> None:
    from rich.console import Console

    from collm.top import Watcher, render

    for name in ("replica-10", "replica-11"):
        record = ReplicaRecord(
            id=name,
            model="SmolLM2-135M-Instruct",
            state="combined",
            adapters={"support": "r12", "law": "r3"},
        )
        await redis.sadd(names.REPLICAS, name)
        await redis.hset(names.replica(name), mapping=record.to_hash())
    watcher = Watcher(redis)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(await watcher.look(), watcher))
    text = console.export_text()
    assert all(word in text for word in ("replica-10", "replica-11", "combined"))
