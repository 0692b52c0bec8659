"""The replica with the real engine on a tiny model: both children, real kills, real adapters."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared import names
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.messages import LoadAdapter, Lost
from tests.replica.harness import GATEWAY, Cluster, Process, generate, running, until
from tests.tiny import write_adapter

PROMPT = (40, 41, 42, 43, 44, 45)


def settings(model: Path, **changes: object) -> dict[str, object]:
    base = {"engine": "torch", "model_path": model, "dtype": "float32", "kv_tokens": 4096}
    return {**base, "threads": 1, **changes}


async def answer(cluster: Cluster, request_id: str, **changes: object) -> tuple[int, ...]:
    await cluster.release(generate(request_id, prompt=PROMPT, tokens=12, **changes))
    await cluster.finish(request_id)
    return await cluster.tokens(request_id)


def roles(process: Process) -> dict[str, psutil.Process]:
    """The children by what they are: training is the one of low priority."""
    found, usual = {}, psutil.Process(process.popen.pid).nice()
    for child in process.children().values():
        found["training" if child.nice() > usual else "inference"] = child
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_greedy_answers_survive_a_kill_of_the_inference_child(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    cluster = Cluster(redis)
    await redis.set(names.gateway_alive(GATEWAY), "1")
    with running(redis_server.url, tmp_path, **settings(tiny_model, training=True)) as process:
        first = await cluster.serving()
        golden = await answer(cluster, "golden")

        async def both() -> bool:
            return set(roles(process)) == {"training", "inference"}

        await until(both, "training runs at low priority")
        before = roles(process)
        await cluster.release(generate("cut", prompt=PROMPT, tokens=500))
        before["inference"].kill()
        await cluster.told(Lost, "cut")
        await cluster.serving(not_incarnation=first.incarnation)
        had = golden[:5]
        await cluster.release(
            generate("golden", prompt=PROMPT, tokens=12, attempt=2, generated=had)
        )
        await cluster.finish("golden", attempt=2)
        assert (await cluster.tokens("golden", attempt=2))[5:] == golden[5:]
        assert roles(process)["training"].pid == before["training"].pid


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_killed_training_child_comes_back_and_serving_does_not_notice(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, **settings(tiny_model, training=True)) as process:
        first = await cluster.serving()

        async def trains() -> psutil.Process | None:
            return roles(process).get("training")

        child = await until(trains, "training runs")
        child.kill()

        async def replaced() -> bool:
            now = roles(process).get("training")
            return now is not None and now.pid != child.pid

        await until(replaced, "a new training process")
        await answer(cluster, "a")
        assert (await cluster.record()).incarnation == first.incarnation


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_adapters_are_served_by_version_and_are_back_after_a_restart(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    cluster = Cluster(redis)
    registry = AdapterRegistry(redis, tmp_path)
    await registry.register("x", base="m", rank=4)
    for version, seed in (("v1", 1), ("v2", 2)):
        path = write_adapter(
            tiny_model, registry.folder("x", version), seed=seed, alpha=64, spread=1.0
        )
        await registry.publish("x", AdapterVersion(version=version, path=str(path)))
    with running(redis_server.url, tmp_path, **settings(tiny_model)) as process:
        first = await cluster.serving()

        async def recorded() -> bool:
            return (await cluster.record()).adapters == {"x": "v2"}

        await until(recorded, "current version loaded before serving")
        base = await answer(cluster, "base")
        second = await answer(cluster, "second", adapter="x")
        pinned = await answer(cluster, "pinned", adapter="x", adapter_version="v1")
        assert len({base, second, pinned}) == 3
        assert (await cluster.finish("pinned")).adapter_version == "v1"
        assert (await cluster.finish("second")).adapter_version == "v2"
        roles(process)["inference"].kill()
        await cluster.serving(not_incarnation=first.incarnation)
        assert await answer(cluster, "again", adapter="x") == second


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_bad_adapter_is_refused_by_an_event_and_the_rest_goes_on(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    cluster = Cluster(redis)
    bad = tmp_path / "adapters" / "bad" / "v1"
    bad.mkdir(parents=True)
    (bad / "adapter_config.json").write_text("{}")
    with running(redis_server.url, tmp_path, **settings(tiny_model)):
        await cluster.serving()
        await cluster.command(LoadAdapter(name="bad", version="v1", path=str(bad), reply_to="me"))

        async def refused() -> dict[bytes, bytes] | None:
            events = [f for _, f in await redis.xrange(names.EVENTS)]
            return next((f for f in events if f.get(b"reply_to") == b"me"), None)

        event = await until(refused, "event of the refusal")
        assert event[b"ok"] == b"0"
        assert b"bad" in event[b"why"]
        await answer(cluster, "a")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_replicas_on_one_core_take_turns(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    """One slot for two engines: both are served, neither keeps the other out."""
    cluster = Cluster(redis)
    shared = {"slots": 1, "slots_dir": tmp_path / "slots"}
    ids = [f"replica-{i}" for i in range(2)]
    values = settings(tiny_model, **shared)
    with (
        running(redis_server.url, tmp_path, id=ids[0], **values),
        running(redis_server.url, tmp_path, id=ids[1], **values),
    ):
        for replica in ids:
            await cluster.serving(replica)
        for replica in ids:
            await cluster.release(
                *(generate(f"{replica}-{i}", prompt=PROMPT, tokens=40) for i in range(4)),
                replica=replica,
            )
        for replica in ids:
            for i in range(4):
                await cluster.finish(f"{replica}-{i}")
        assert sorted(os.listdir(tmp_path / "slots")) == ["gate", "inference-waits", "slot-0"]
