"""A cluster in Redis, written with the classes that the services use: what the page shows."""

from __future__ import annotations

import math
from pathlib import Path

from redis.asyncio import Redis

from shared import names, sessions
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.messages import Finished, StepSample, TrainSample, encode
from shared.records import ModelCard, ReplicaRecord
from shared.replica_state import State, event, move
from shared.sessions import Phase, Session

MODEL = "SmolLM2-135M-Instruct"
CLIENTS = ("replica-1", "replica-2", "replica-3")


async def now(redis: Redis) -> float:
    seconds, micros = await redis.time()
    return float(seconds + micros / 1e6)


async def replicas(redis: Redis, *, count: int = 5, engine: str = "emulated") -> None:
    """Replicas that serve; those of CLIENTS train beside it, the last one has died."""
    moment = await now(redis)
    card = ModelCard(name=MODEL, path="/models/smol", context=2048, vocabulary=49152, engine=engine)
    await redis.hset(names.model(MODEL), mapping=card.to_hash())
    await redis.sadd(names.MODELS, MODEL)
    for index in range(count):
        name = f"replica-{index}"
        record = ReplicaRecord(
            id=name, model=MODEL, engine=engine, b=24, b_max=32, B=4 if name in CLIENTS else 0,
            in_flight=3 * index, kv_free=600, kv_total=1000, b_star=10 + 2 * index,
            adapters={"support": "r5"}, data={"support": 128}, started=moment,
        )  # fmt: skip
        hidden = {"state", "since", "by", "why", "incarnation"}
        await redis.hset(
            names.replica(name),
            mapping={k: v for k, v in record.to_hash().items() if k not in hidden},
        )
        await redis.sadd(names.REPLICAS, name)
        await redis.set(names.replica_alive(name), "1", ex=600)
        await move(redis, name, State.STARTING, by=name, why="process started")
        await move(redis, name, State.SERVING, by=name, why="model loaded")
        if name in CLIENTS:
            await move(redis, name, State.COMBINED, by="launcher", why="utilisation 0.11 < 0.25")
    await redis.delete(names.replica_alive(f"replica-{count - 1}"))
    await move(redis, f"replica-{count - 1}", State.DEAD, by="dispatcher", why="heartbeat expired")


async def steps(redis: Redis, *, count: int = 5, emulated: bool = True) -> None:
    """Engine steps of each replica, and requests that wait."""
    moment = await now(redis)
    for index in range(count):
        sample = StepSample(
            replica=f"replica-{index}", model=MODEL, incarnation="1", seq=1, time=moment,
            seconds=0.2, steps=8, b=6 + 2 * index, decode_tokens=80 + 10 * index,
            finished=(Finished("r.0", 1, 20, 30, "stop"),), emulated=emulated,
        )  # fmt: skip
        await redis.xadd(
            names.METRICS, {"kind": "step_sample", "time": f"{moment}", "body": encode(sample)}
        )
    for _ in range(7):
        await redis.xadd(names.requests(MODEL), {"id": "waiting"})


async def adapters(redis: Redis, folder: Path) -> None:
    """Two adapters; the better known one with six versions, one of which was kept back."""
    registry = AdapterRegistry(redis, folder)
    for name, rounds in (("support", 6), ("legal-de", 3)):
        await registry.register(name, base=MODEL, rank=8, source="data")
        quality = 1.0
        for number in range(rounds):
            promote = number != 3
            gain = 1.06 if name == "support" else 1.03
            quality *= 1.0 if number == 0 else gain if promote else 0.97
            entry = AdapterVersion(
                version=f"r{number}", path=f"{folder}/{name}/r{number}", round=number,
                quality=quality, parent=f"r{number - 1}" if number else "",
                heldout_ce=2.4 - 0.07 * number,
            )  # fmt: skip
            await registry.publish(name, entry, promote=promote, why=f"round {number}")


async def rounds(redis: Redis) -> str:
    """A session in its fourth round, with the training steps of its clients; its id."""
    moment = await now(redis)
    session = Session(
        id="support-1a2b", adapter="support", base=MODEL, clients=CLIENTS, server="replica-1",
        why="3 idle replicas hold 384 new samples", created=moment, phase=Phase.TRAIN, round=4,
        done=3, deadline=moment + 95, B=dict.fromkeys(CLIENTS, 4),
    )  # fmt: skip
    await sessions.open_session(redis, session)
    start = moment - 90
    await redis.hset(names.session(session.id), "created", f"{start}")
    for number in range(40):
        for offset, client in enumerate(CLIENTS):
            sample = TrainSample(
                replica=client, adapter="support", time=start + 2 * number, round=number // 10,
                step=number, B=4, b=3, micro_seconds=0.2,
                loss=2.1 + 0.9 * math.exp(-number / 15) + 0.05 * math.sin(number * 2.0 + offset),
            )  # fmt: skip
            await redis.xadd(names.METRICS, {"kind": "train_sample", "body": encode(sample)})
    for number in range(1, 4):
        await event(
            redis, "round_done", session=session.id, adapter="support", round=number,
            version=f"r{number}", promoted="no" if number == 3 else "yes",
            loss=f"{2.9 - 0.2 * number:.5f}", heldout=f"{2.8 - 0.17 * number:.5f}",
            quality=1.0 + 0.06 * number, used=",".join(CLIENTS),
        )  # fmt: skip
    return session.id
