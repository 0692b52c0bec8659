"""A hardware profile from what a running system reported, through a real Redis."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from bench import origin
from collm.redis_server import RedisServer
from shared import names, profile
from shared.messages import BODY, Message, StepSample, TrainSample, encode
from shared.records import ModelCard, ReplicaRecord
from sim.scenario import Scenario, run
from sim.workload import Workload

ROOT = Path(__file__).resolve().parents[2]


async def _measured(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.measured", *arguments, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, (out + err).decode()


async def _replica(redis: Redis, name: str, **fields: object) -> None:
    values = {"model": "m", "host": "here", "b_max": 12, "kv_total": 5000, "context": 2048}
    record = ReplicaRecord(id=name, **{**values, **fields})  # type: ignore[arg-type]
    await redis.sadd(names.REPLICAS, name)
    await redis.hset(names.replica(name), mapping=record.to_hash())
    card = ModelCard(name="m", path="/m", context=2048, vocabulary=777, dtype="bfloat16")
    await redis.hset(names.model("m"), mapping=card.to_hash())


async def _report(redis: Redis, kind: str, sample: Message) -> None:
    await redis.xadd(names.METRICS, {"kind": kind, BODY: encode(sample)})


def _step(replica: str, time: float, b: int, seconds: float, B: int = 0, p: int = 0) -> StepSample:
    return StepSample(
        replica=replica, model="m", incarnation="i", seq=0, time=time, seconds=seconds, b=b, B=B,
        prefill_tokens=p, decode_tokens=b,
    )  # fmt: skip


async def _served(redis: Redis, replica: str, slower: float = 1.0, training: bool = True) -> None:
    """Decode 2 ms a request, 1 ms a sample beside, 30 ms; 0.5 ms a prompt token; training 20 ms a
    sample and 50 ms: with a little noise."""
    rng, time = random.Random(3), 0.0
    beside = (0, 4, 8) if training else (0,)
    for _ in range(12):
        for b in (1, 2, 4, 8):
            for B in beside:
                time += 1.0
                seconds = slower * (0.002 * b + 0.001 * B + 0.03) * rng.uniform(0.98, 1.02)
                await _report(redis, "step", _step(replica, time, b, seconds, B))
    for p in (50, 100, 400, 800):
        time += 1.0
        seconds = slower * (0.002 * 4 + 0.03 + 0.0005 * p)
        await _report(redis, "step", _step(replica, time, 4, seconds, 0, p))
    for B in beside[1:] * 6:
        sample = TrainSample(
            replica=replica, adapter="a", time=time, round=1, step=1, B=B, b=0,
            micro_seconds=slower * (0.02 * B + 0.05),
        )  # fmt: skip
        await _report(redis, "train", sample)


async def test_a_profile_is_fitted_to_what_a_running_system_reports(
    redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    for name in ("r0", "r1"):
        await _replica(redis, name)
        await _served(redis, name)
    await _report(redis, "util", _step("r0", 0.0, 1, 9.0))  # of other kinds nothing is read
    out = tmp_path / "my.yaml"
    status, told = await _measured("--redis", redis_server.url, "--out", str(out))
    assert status == 0, told
    made = profile.load(str(out))
    wanted = {"alpha0": 0.03, "alpha1": 0.002, "alpha2": 0.001, "pi1": 0.0005}
    wanted |= {"gamma0": 0.05, "gamma1": 0.02}
    for key, value in wanted.items():
        assert getattr(made.coefficients, key) == pytest.approx(value, rel=0.1), key
    assert (made.name, made.b_max, made.kv_tokens) == ("my", 12, 5000)
    assert (made.context, made.vocabulary) == (2048, 777)
    assert 0.0 < made.jitter < 0.05
    assert made.numbers["gamma"].startswith("24 samples")
    assert "296 steps" in made.source
    work = Workload(rate=2.0, prompt_tokens=100, output_tokens=20, limit=50)
    found = run(Scenario(profile=str(out), replicas=1, workload=work, policy="least_loaded"))
    assert found["completed"] == 50


async def test_the_file_says_what_was_measured_and_on_what(
    redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    for name in ("r0", "r1"):
        await _replica(redis, name, host=socket.gethostname(), thread_slots=3, device="cpu")
        await _served(redis, name)
    out = tmp_path / "my.yaml"
    where = ("--redis", redis_server.url, "--out", str(out))
    status, told = await _measured(*where)
    assert status == 0, told
    made = profile.load(str(out))
    assert made.numbers["model"] == "m, bfloat16"
    assert made.numbers["engine"] == "torch"
    assert made.numbers["replicas"] == "2 replicas at once, 3 compute threads each"
    assert made.numbers["machine"] == f"{origin.machine()}, on cpu"
    assert made.numbers.get("commit") == origin.commit()
    assert f"m, bfloat16, 2 replicas at once, 3 compute threads each; {origin.machine()}" in (
        made.source
    )
    assert redis_server.url not in out.read_text()
    for name in ("r0", "r1"):
        await _replica(redis, name, host="elsewhere", engine="emulated")
    assert (await _measured(*where, "--replicas", "r1"))[0] == 0
    numbers = profile.load(str(out)).numbers
    assert numbers["machine"] == "host elsewhere, which is not this one, on no device: emulated"
    assert numbers["replicas"] == "1 replica at once, 1 compute thread each"


async def test_what_was_not_seen_is_named_in_the_file(
    redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    await _replica(redis, "r0")
    await _served(redis, "r0", training=False)
    out = tmp_path / "my.yaml"
    status, told = await _measured("--redis", redis_server.url, "--out", str(out))
    assert status == 0, told
    for name in ("gamma", "alpha2"):
        assert "--no-train only" in profile.load(str(out)).numbers[name]
        assert f"{name}: " in told


async def test_replicas_that_differ_are_refused_until_those_of_a_kind_are_named(
    redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    await _replica(redis, "r0")
    await _replica(redis, "r1", host="there")
    await _served(redis, "r0")
    await _served(redis, "r1", slower=3.0)
    out = tmp_path / "my.yaml"
    where = ("--redis", redis_server.url, "--out", str(out))
    status, told = await _measured(*where)
    assert status == 1
    assert "--replicas" in told
    assert "r1: m|torch|there" in told
    assert (await _measured(*where, "--replicas", "r1"))[0] == 0
    assert profile.load(str(out)).coefficients.alpha0 == pytest.approx(0.09, rel=0.1)
    status, told = await _measured(*where, "--replicas", "r7")
    assert (status, "no replica 'r7'" in told) == (1, True)


async def test_too_few_steps_no_system_and_a_bad_name_are_told(
    redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    where = ("--redis", redis_server.url, "--out", str(tmp_path / "my.yaml"))
    assert "start a system" in (await _measured(*where))[1]
    await _replica(redis, "r0")
    await _report(redis, "step", _step("r0", 1.0, 4, 0.04))
    status, told = await _measured(*where)
    assert status == 1
    assert "1 steps, none with two batch sizes" in told
    assert "at several rates" in told
    status, told = await _measured("--redis", "redis://127.0.0.1:1", *where[2:])
    assert (status, "redis://127.0.0.1:1" in told) == (1, True)
    status, told = await _measured(*where[:2], "--out", "my.txt")
    assert (status, "ending in .yaml" in told) == (2, True)
    assert not list(tmp_path.iterdir())
