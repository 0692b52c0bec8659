"""The rq jobs of a replica's training process; see ``shared.rounds`` for what each does.

Arguments and results are the structs of that module as JSON values. A job that cannot do its
work raises with a message for people; the context of the process comes from the worker.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from services.replica.training.context import CONTEXT, TrainingContext, read_tensors
from services.replica.training.evaluation import cross_entropy
from services.replica.training.exchange import Exchange
from services.replica.training.gate import Stopped
from services.replica.training.local_round import LocalRound
from services.replica.training.model import LoraSpec, ModelError
from services.replica.training.publisher import write_folder
from services.replica.training.update import path_of
from shared import blobs
from shared.aggregation import ClientUpdate, Target
from shared.aggregation import aggregate as aggregate_updates
from shared.rounds import (
    AggregateJob,
    AggregateResult,
    BadJob,
    EvaluateJob,
    EvaluateResult,
    InitialiseJob,
    InitialiseResult,
    PrepareJob,
    PrepareResult,
    RoundJob,
    SendJob,
    SendResult,
    from_json,
    to_json,
)

SERVER_STATE = "server_state.safetensors"  # beside the tensors of the version it belongs to

Arrays = dict[str, NDArray[np.float32]]
Json = dict[str, Any]


def initialise(plain: Json) -> Json:
    """InitialiseJob -> InitialiseResult. A version that is there already stays."""
    job, context = from_json(plain, InitialiseJob), CONTEXT.get()
    adapter = context.fresh_adapter(job.lora, job.seed)
    path = write_folder(
        Path(context.config.data_dir),
        job.adapter,
        job.version,
        adapter.spec,
        adapter.tensors(),
        context.config.folder,
    )
    return to_json(InitialiseResult(version=job.version, path=str(path)))


def prepare(plain: Json) -> Json:
    """PrepareJob -> PrepareResult."""
    job, context = from_json(plain, PrepareJob), CONTEXT.get()
    if job.base != context.config.model:
        raise BadJob(f"base {job.base!r}: this replica holds {context.config.model!r}")
    begun = time.monotonic()
    data = context.data_set(job.adapter, job.max_tokens, job.heldout_fraction)
    if data is None:
        return to_json(PrepareResult(examples=0, seconds=0.0))
    context.fresh_adapter(job.lora, job.seed)
    seconds = time.monotonic() - begun
    return to_json(PrepareResult(examples=len(data.train.examples), seconds=seconds))


def local_round(plain: Json) -> Json:
    """RoundJob -> RoundResult."""
    job, context = from_json(plain, RoundJob), CONTEXT.get()
    if job.base != context.config.model:
        raise BadJob(f"base {job.base!r}: this replica holds {context.config.model!r}")
    return to_json(LocalRound(context, job, context.check).run())


def send_update(plain: Json) -> Json:
    """SendJob -> SendResult: the update kept from the round, over the group or as a blob."""
    job, context = from_json(plain, SendJob), CONTEXT.get()
    path = path_of(context.config.home, job.adapter, job.session, job.round)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as e:
        raise BadJob(f"round {job.round} of session {job.session}: no update is kept here") from e
    if job.group is not None:
        with Exchange(context.redis, job.group, str(context.device)) as exchange:
            traffic = exchange.send(load_arrays(raw))
        return to_json(SendResult(seconds=traffic.seconds, bytes=traffic.bytes))
    begun = time.monotonic()
    blobs.put_sync(context.redis, job.blob, raw)
    return to_json(SendResult(seconds=time.monotonic() - begun, bytes=len(raw)))


def aggregate(plain: Json) -> Json:
    """AggregateJob -> AggregateResult. Bad updates are left out whole and named."""
    job, context = from_json(plain, AggregateJob), CONTEXT.get()
    parent = {n: t.numpy() for n, t in read_tensors(Path(job.parent_path)).items()}
    received, rejected, exchange_seconds, moved = _gather(context, job)
    updates = [
        ClientUpdate(
            client=u.client,
            round=u.round,
            base=u.base,
            parent=u.parent,
            examples=u.examples,
            rank=u.lora.rank,
            lora_alpha=u.lora.lora_alpha,
            tensors=received[u.client],
        )
        for u in job.updates
        if u.client in received
    ]
    target = Target(
        round=job.round,
        base=job.base,
        parent=job.parent,
        rank=job.lora.rank,
        lora_alpha=job.lora.lora_alpha,
        tensors=parent,
    )
    done = aggregate_updates(
        job.strategy, updates, target, _server_state(Path(job.parent_path)), job.options
    )
    path = write_folder(
        Path(context.config.data_dir),
        job.adapter,
        job.version,
        LoraSpec(job.lora.rank, job.lora.lora_alpha, job.lora.target_modules),
        {n: torch.from_numpy(t) for n, t in done.tensors.items()},
        context.config.folder,
        extra={SERVER_STATE: save_arrays(done.state)} if done.state else None,
    )
    return to_json(
        AggregateResult(
            version=job.version,
            path=str(path),
            used=done.used,
            rejected={**rejected, **done.rejected},
            aggregation_error=done.error,
            exchange="redis" if job.group is None else job.group.backend,
            exchange_seconds=exchange_seconds,
            exchange_bytes=moved,
        )
    )


def evaluate(plain: Json) -> Json:
    """EvaluateJob -> EvaluateResult: held-out cross-entropy of each version, or of the base."""
    job, context = from_json(plain, EvaluateJob), CONTEXT.get()
    data = context.data_set(job.adapter, job.max_tokens, job.heldout_fraction)
    if data is None or not data.heldout.examples:
        return to_json(EvaluateResult(client=job.client, ce=(None,) * len(job.paths), tokens=0))
    examples = data.heldout.examples[: job.max_samples]
    found: list[float | None] = [
        cross_entropy(context, p, examples, context.check) for p in job.paths
    ]
    tokens = sum(sum(e.learnt[1:]) for e in examples)
    return to_json(EvaluateResult(client=job.client, ce=tuple(found), tokens=tokens))


# ---------------------------------------------------------------- parts


def _gather(
    context: TrainingContext, job: AggregateJob
) -> tuple[dict[str, Arrays], dict[str, str], float, int]:
    """Client -> tensors, client -> why it is left out, seconds and bytes of the exchange."""
    own = job.server
    received: dict[str, Arrays] = {}
    rejected: dict[str, str] = {}
    seconds, moved = 0.0, 0
    if job.group is not None:
        with Exchange(context.redis, job.group, str(context.device)) as exchange:
            received, traffic = exchange.receive()
        seconds, moved = traffic.seconds, traffic.bytes
    begun = time.monotonic()
    for update in job.updates:
        if update.client in received:
            continue
        try:
            raw = _update_bytes(context, job, update.client == own, update.blob)
            received[update.client] = load_arrays(raw)
            moved += len(raw)
        except (blobs.BlobError, SafetensorError, OSError) as e:
            rejected[update.client] = f"its update cannot be read: {e}"
    return received, rejected, seconds + time.monotonic() - begun, moved


def _update_bytes(context: TrainingContext, job: AggregateJob, own: bool, blob: str) -> bytes:
    """The server's own update lies on its disk; the others' are blobs."""
    if own:
        path = path_of(context.config.home, job.adapter, job.session, job.round)
        if path.exists():
            return path.read_bytes()
    return blobs.get_sync(context.redis, blob)


def _server_state(parent: Path) -> Arrays | None:
    path = parent / SERVER_STATE
    if not path.exists():
        return None
    try:
        loaded: Arrays = load_arrays(path.read_bytes())
    except SafetensorError as e:
        raise ModelError(f"{path}: damaged server state: {e}") from e
    return loaded


__all__ = [
    "Stopped",
    "aggregate",
    "evaluate",
    "initialise",
    "local_round",
    "prepare",
    "send_update",
]
