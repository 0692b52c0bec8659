"""A replica without a model, as a process: ``python -m tests.coordinator.replica_process``.

Real heartbeat, record, rq worker, blobs, aggregation and adapter folders; only the training is
made up: tensors move towards a target of the replica's own, and the loss is the squared distance
to it. Starts in half a second because it never imports torch. What it does wrong is read from
the Redis hash ``test:<replica>`` before each job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer
from safetensors.numpy import load, save

from shared import adapter_files, blobs, names, rounds
from shared.aggregation import ClientUpdate, Target
from shared.aggregation import aggregate as aggregate_updates
from shared.records import ReplicaRecord
from shared.rounds import from_json, to_json

URL, REPLICA = sys.argv[1], sys.argv[2]
BASE = "m"
SHAPES = {"q_proj": (6, 10), "v_proj": (4, 10)}
redis = Redis.from_url(URL, socket_timeout=60)


def wrong() -> dict[str, str]:
    """What this replica does wrong at the moment."""
    raw: Any = redis.hgetall(f"test:{REPLICA}")
    return {k.decode(): v.decode() for k, v in raw.items()}


def data() -> Path:
    """The data folder of the test that runs."""
    raw: Any = redis.get("test:data")
    return Path(raw.decode())


def now() -> float:
    seconds, micros = redis.time()  # type: ignore[misc]
    return float(seconds + micros / 1e6)


def goal(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sum(REPLICA.encode()))
    return {n: rng.normal(size=t.shape).astype(np.float32) for n, t in sorted(tensors.items())}


def distance(tensors: dict[str, np.ndarray]) -> float:
    wanted = goal(tensors)
    return float(np.mean([np.mean((tensors[n] - wanted[n]) ** 2) for n in tensors]))


def write(adapter: str, version: str, tensors: dict[str, np.ndarray], lora: rounds.Lora) -> Path:
    with adapter_files.staged(data(), adapter, version) as folder:
        (folder / adapter_files.TENSOR_FILE).write_bytes(save(tensors))
        config = {
            "peft_type": "LORA",
            "r": lora.rank,
            "lora_alpha": lora.lora_alpha,
            "target_modules": list(lora.target_modules),
        }
        (folder / adapter_files.CONFIG_FILE).write_text(json.dumps(config))
    return adapter_files.folder(data(), adapter, version)


def read(path: str) -> dict[str, np.ndarray]:
    return load((Path(path) / adapter_files.TENSOR_FILE).read_bytes())


def initialise(plain: dict[str, Any]) -> dict[str, Any]:
    job = from_json(plain, rounds.InitialiseJob)
    rng, tensors = np.random.default_rng(job.seed), {}
    for module, (rows, columns) in SHAPES.items():
        stem = f"base_model.model.{module}"
        shape = (job.lora.rank, columns)
        tensors[f"{stem}.lora_A.weight"] = rng.normal(size=shape).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = np.zeros((rows, job.lora.rank), np.float32)
    path = write(job.adapter, job.version, tensors, job.lora)
    return to_json(rounds.InitialiseResult(version=job.version, path=str(path)))


def prepare(plain: dict[str, Any]) -> dict[str, Any]:
    job = from_json(plain, rounds.PrepareJob)
    redis.rpush("test:prepared", f"{REPLICA} {job.adapter} {job.lora.rank} {job.max_tokens}")
    return to_json(rounds.PrepareResult(examples=8, seconds=0.0))


def local_round(plain: dict[str, Any]) -> dict[str, Any]:
    job, fault, started = from_json(plain, rounds.RoundJob), wrong(), now()
    redis.hincrby("test:jobs", f"{job.round}:{REPLICA}", 1)
    trouble(fault.get("local_round", ""))
    parent = read(job.parent_path)
    first, wanted = distance(parent), goal(parent)
    tensors = {n: (t + 0.3 * (wanted[n] - t)).astype(np.float32) for n, t in parent.items()}
    spoil(fault.get("update", ""), tensors)
    examples = int(fault.get("examples", 8))
    if examples:
        blobs.put_sync(redis, job.blob, save(tensors))
    (data() / "replicas" / REPLICA).mkdir(parents=True, exist_ok=True)
    (data() / "replicas" / REPLICA / "update").write_bytes(save(tensors))
    return to_json(
        rounds.RoundResult(
            session=job.session,
            round=int(fault.get("round", job.round)),
            client=REPLICA,
            base=job.base,
            parent=job.parent,
            lora=job.lora,
            examples=examples,
            steps=job.steps if examples else 0,
            heldout_before=job.heldout_before,
            first_loss=first,
            loss=distance(tensors) if fault.get("update") is None else first,
            loss_reduction=0.01,
            noise=rounds.GradientNoise(gradient=0.5, trace=8.0, count=2),
            started=started,
            first_step=now(),
            seconds=now() - started,
            train_seconds=0.01,
            parts={"prepare": 0.002},
            blob=job.blob if job.exchange == "redis" else "",
        )
    )


def trouble(what: str) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise RuntimeError("the data set is damaged")
    if what == "hang":
        end = time.monotonic() + 60
        while time.monotonic() < end and wrong().get("local_round") == "hang":
            time.sleep(0.02)


def spoil(what: str, tensors: dict[str, np.ndarray]) -> None:
    name = "base_model.model.q_proj.lora_B.weight"
    if what == "nan":
        tensors[name][0, 0] = np.nan
    if what == "shape":
        tensors[name] = tensors[name].T.copy()
    if what == "worse":
        for n in tensors:
            tensors[n] *= 50


def send_update(plain: dict[str, Any]) -> dict[str, Any]:
    job = from_json(plain, rounds.SendJob)
    if job.group is not None:
        raise RuntimeError(f"GroupBroken: group {job.group.id}: rendezvous failed")
    raw = (data() / "replicas" / REPLICA / "update").read_bytes()
    blobs.put_sync(redis, job.blob, raw)
    return to_json(rounds.SendResult(seconds=0.01, bytes=len(raw)))


def aggregate(plain: dict[str, Any]) -> dict[str, Any]:
    job = from_json(plain, rounds.AggregateJob)
    redis.hincrby("test:aggregations", job.version, 1)
    trouble(wrong().get("aggregate", ""))
    if job.group is not None:
        raise RuntimeError(f"GroupBroken: group {job.group.id}: rendezvous failed")
    updates = [
        ClientUpdate(
            client=u.client,
            round=u.round,
            base=u.base,
            parent=u.parent,
            examples=u.examples,
            rank=u.lora.rank,
            lora_alpha=u.lora.lora_alpha,
            tensors=load(blobs.get_sync(redis, u.blob)),
        )
        for u in job.updates
    ]
    target = Target(
        job.round, job.base, job.parent, job.lora.rank, job.lora.lora_alpha, read(job.parent_path)
    )
    done = aggregate_updates(job.strategy, updates, target, None, job.options)
    path = write(job.adapter, job.version, done.tensors, job.lora)
    return to_json(
        rounds.AggregateResult(
            version=job.version,
            path=str(path),
            used=done.used,
            rejected=done.rejected,
            aggregation_error=done.error,
        )
    )


def evaluate(plain: dict[str, Any]) -> dict[str, Any]:
    job = from_json(plain, rounds.EvaluateJob)
    redis.rpush(f"test:evaluated:{REPLICA}", str(len(job.paths)))
    ce = tuple(distance(read(path)) for path in job.paths)
    return to_json(rounds.EvaluateResult(client=REPLICA, ce=ce, tokens=10))


def beat() -> None:
    """Heartbeat and, after a test has emptied Redis, the record anew."""
    record = ReplicaRecord(
        id=REPLICA, model=BASE, incarnation="1", b_max=8, state="idle", data={"chat": 8}
    )
    while True:
        if not redis.exists(names.replica(REPLICA)):
            redis.hset(names.replica(REPLICA), mapping=record.to_hash())  # type: ignore[arg-type]
            redis.sadd(names.REPLICAS, REPLICA)
        redis.set(names.replica_alive(REPLICA), "1", px=3000)
        time.sleep(0.1)


def main() -> None:
    module = types.ModuleType("services.replica.training.job")
    for function in (initialise, prepare, local_round, send_update, aggregate, evaluate):
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
    threading.Thread(target=beat, daemon=True).start()
    queue = Queue(names.train_queue(REPLICA), connection=redis, serializer=JSONSerializer)
    worker = SimpleWorker(
        [queue], name=f"{REPLICA}-{os.getpid()}", connection=redis, serializer=JSONSerializer
    )
    worker.work(logging_level="ERROR")


if __name__ == "__main__":
    main()
