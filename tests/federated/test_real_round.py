"""A session with real models: three training processes, Gloo between them, PEFT folders out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from safetensors.numpy import load_file

from collm.redis_server import RedisServer
from services.coordinator.meters import Meters
from services.coordinator.service import CoordinatorService
from services.coordinator.settings import CoordinatorSettings
from shared import adapter_files, data_homes, names, sessions
from shared.adapters import AdapterRegistry
from shared.clock import RedisClock
from shared.leader import Acting
from shared.lease import Lease
from shared.records import ReplicaRecord
from tests.training.process import TrainingProcess

REPLICAS = ("r0", "r1", "r2")
TRAINING: dict[str, Any] = {
    "rank": 4,
    "lora_alpha": 8.0,
    "target_modules": ["q_proj", "v_proj"],
    "strategy": "flexlora",
    "client_ranks": {"r1": 2},
    "local_steps": 3,
    "accumulation": 1,
    "B0": 2,
    "max_rounds": 2,
    "learning_rate": 0.01,
    "heldout_samples": 4,
}


@pytest.fixture
def trainers(
    redis: Redis, redis_server: RedisServer, tiny_model: Path, tmp_path: Path
) -> Iterator[list[TrainingProcess]]:
    made = [TrainingProcess(redis_server.url, tiny_model, tmp_path, name) for name in REPLICAS]
    for i, trainer in enumerate(made):
        data_homes.store(tmp_path, trainer.replica, "chat", "own", _chats(i))
        trainer.block.B = 2
        trainer.start()
    yield made
    for trainer in made:
        trainer.stop()


def _chats(domain: int) -> bytes:
    """Each client's own kind of answer."""
    lines = []
    for i in range(30):
        answer = ("aaaa", "0123", "....")[domain] + str(i)
        lines.append({"messages": [{"role": "user", "content": f"say {i}"},
                                   {"role": "assistant", "content": answer}]})  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def beat(redis: Redis) -> None:
    """What the replicas' supervisors would write."""
    for name in REPLICAS:
        record = ReplicaRecord(
            id=name, model="tiny", incarnation="1", b_max=8, state="idle", data={"chat": 30}
        )
        await redis.hset(names.replica(name), mapping=record.to_hash())
        await redis.sadd(names.REPLICAS, name)
    while True:
        for name in REPLICAS:
            await redis.set(names.replica_alive(name), "1", px=3000)
        await asyncio.sleep(0.2)


async def ended(redis: Redis) -> list[dict[str, str]]:
    """All events once the session has ended."""
    async with asyncio.timeout(240):
        while True:
            found = [
                {k.decode(): v.decode() for k, v in fields.items()}
                for _, fields in await redis.xrange(names.EVENTS)
            ]
            if any(e["kind"] == "session_ended" for e in found):
                return found
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_real_clients_of_unequal_ranks_learn_together_over_gloo(
    trainers: list[TrainingProcess], redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    settings = CoordinatorSettings.model_validate(
        {
            "redis_url": redis_server.url,
            "data_dir": tmp_path,
            "training": TRAINING,
            "exchange": "group",
        }
    )
    lease, clock = Lease(redis, "coordinator"), RedisClock()
    assert await lease.try_acquire()
    await clock.synchronise(redis)
    meters = Meters()
    service = CoordinatorService(settings, meters)
    tasks = [
        asyncio.create_task(beat(redis)),
        asyncio.create_task(service.act(Acting(redis, lease, clock))),
    ]
    session = sessions.Session(
        id=sessions.new_id("chat"), adapter="chat", base="tiny", clients=REPLICAS, server="r0"
    )
    try:
        await sessions.open_session(redis, session)
        events = await ended(redis)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    done = [e for e in events if e["kind"] == "round_done"]
    assert [(e["used"], e["exchange"]) for e in done] == [("r0,r1,r2", "gloo")] * 2
    assert [e for e in events if e["kind"] == "exchange_fallback"] == []
    [moved] = meters.exchange_bytes.collect()
    totals = {s.labels["path"]: s.value for s in moved.samples if s.name.endswith("_total")}
    assert totals == {"gloo": sum(int(e["exchange_bytes"]) for e in done)}
    assert float(done[1]["heldout"]) < float(done[0]["heldout"]) < float(done[0]["heldout_before"])
    registry = AdapterRegistry(redis, tmp_path)
    current = await registry.current("chat")
    assert current is not None
    assert current.version == "r2"
    card = adapter_files.read_card(Path(current.path))
    assert (card.rank, set(card.target_modules)) == (4, {"q_proj", "v_proj"})
    first = await registry.version("chat", "r0")
    before, after = (load_file(Path(v.path) / adapter_files.TENSOR_FILE) for v in (first, current))
    assert before.keys() == after.keys()
    assert all(np.isfinite(t).all() for t in after.values())
    assert any(not np.array_equal(before[n], after[n]) for n in before)
