"""Strategies compared: three training contexts in one process, one client after another.

The functions are those that a replica's training process runs as rq jobs (local_round,
aggregate, evaluate) on a real Redis; only the processes around them are missing, so that the
clients do not compete for this machine's cores while learning is compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from collm.redis_server import RedisServer
from services.replica.control_block import ControlBlock
from services.replica.training import job as jobs
from services.replica.training.config import WorkerConfig
from services.replica.training.context import CONTEXT, TrainingContext
from shared import data_homes, rounds
from shared.aggregation import trained_factors
from shared.redis_client import connect_sync
from shared.rounds import Lora, RoundResult, from_json, to_json

CLIENTS = ("replica-0", "replica-1", "replica-2")


@dataclass(frozen=True)
class Plan:
    """Sizes of the comparison; steps are optimiser steps a client and round."""

    rounds: int
    steps: int
    micro_batch: int
    accumulation: int
    max_tokens: int
    heldout: int  # held-out samples a domain
    learning_rate: float
    server_lr: float = 1e-3
    seed: int = 0
    lora: Lora = field(default_factory=Lora)


class Lab:
    """Clients with their private data, on one base model in shared memory."""

    def __init__(self, model: Path, domains: Mapping[str, Path], scratch: Path, plan: Plan) -> None:
        self.plan, self.domains = plan, dict(zip(CLIENTS, domains, strict=True))
        self._scratch, self._version = scratch, 0
        self._server = RedisServer(scratch / "redis", append_only=False)
        self._server.start()
        cores = torch.get_num_threads()
        self._contexts: dict[str, TrainingContext] = {}
        for client, (domain, file) in zip(CLIENTS, domains.items(), strict=True):
            suffix = file.suffix
            data_homes.store(scratch, client, "bench", domain, file.read_bytes(), suffix)
            home = scratch / "replicas" / client
            ControlBlock.create(home / "control.bin").B = plan.micro_batch
            config = WorkerConfig(
                replica=client,
                model="bench",
                folder=str(model),
                redis_url=self._server.url,
                data_dir=str(scratch),
                control=str(home / "control.bin"),
                slots=str(scratch / "slots"),
                slot_count=cores,
                shadow=str(home / "shadow.bin"),
                settings={"heldout_limit": plan.heldout, "evaluate_every": 1000, "threads": cores},
            )
            redis = connect_sync(self._server.url)
            self._contexts[client] = TrainingContext(config, redis)

    def close(self) -> None:
        for context in self._contexts.values():
            context.redis.close()
        self._server.stop()

    @contextmanager
    def _as(self, client: str) -> Iterator[None]:
        context = self._contexts[client]
        context.synchronise()
        token = CONTEXT.set(context)
        try:
            yield
        finally:
            context.drop_adapter()  # one LoRA at a time on the shared memory of this process
            CONTEXT.reset(token)

    def start(self) -> str:
        """Folder of the common first version: A random, B zero."""
        with self._as(CLIENTS[0]):
            made = rounds.InitialiseJob(
                adapter="bench",
                version="start",
                lora=self.plan.lora,
                seed=self.plan.seed,
            )
            return str(jobs.initialise(to_json(made))["path"])

    def heldout(self, path: str) -> dict[str, float]:
        """Domain -> cross-entropy in nats per token; "" is the base model."""
        found = {}
        for client in CLIENTS:
            asked = rounds.EvaluateJob(
                client=client,
                adapter="bench",
                paths=(path,),
                max_tokens=self.plan.max_tokens,
                max_samples=self.plan.heldout,
            )
            with self._as(client):
                found[self.domains[client]] = float(jobs.evaluate(to_json(asked))["ce"][0])
        return found

    def train(
        self, client: str, name: str, number: int, parent: str, path: str, strategy: str
    ) -> RoundResult:
        """One client's local round."""
        p = self.plan
        work = rounds.RoundJob(
            session=name,
            round=number,
            client=client,
            adapter="bench",
            base="bench",
            parent=parent,
            parent_path=path,
            lora=p.lora,
            train=trained_factors(strategy, number),
            prox_mu=0.01 if strategy == "fedprox" else 0.0,
            steps=p.steps,
            accumulation=p.accumulation,
            micro_batches=(p.micro_batch,),
            learning_rate=p.learning_rate,
            max_rounds=p.rounds,
            max_tokens=p.max_tokens,
            judged=True,  # the curve asks for all losses itself
            publish="per_round",
            blob=f"{name}-{number}-{client}",
            seed=p.seed,
        )
        with self._as(client):
            return from_json(jobs.local_round(to_json(work)), RoundResult)

    def aggregate(
        self,
        name: str,
        number: int,
        parent: str,
        path: str,
        strategy: str,
        results: Sequence[RoundResult],
    ) -> dict[str, Any]:
        """The server's job over the clients' blobs."""
        updates = tuple(
            rounds.Update(
                client=r.client,
                round=r.round,
                base=r.base,
                parent=r.parent,
                examples=r.examples,
                lora=r.lora,
                blob=r.blob,
            )
            for r in results
        )
        work = rounds.AggregateJob(
            session=name,
            round=number,
            server=CLIENTS[0],
            adapter="bench",
            base="bench",
            parent=parent,
            parent_path=path,
            version=f"{name}-r{number}",
            lora=self.plan.lora,
            strategy=strategy,
            options={"server_lr": self.plan.server_lr},
            updates=updates,
        )
        with self._as(CLIENTS[0]):
            return jobs.aggregate(to_json(work))


def federated(lab: Lab, strategy: str, start: str) -> dict[str, Any]:
    """All rounds of one strategy: the curve of the mean held-out loss, and its figures."""
    parent, path, curve, errors = "start", start, list[float](), list[float]()
    begun, heldout = time.monotonic(), dict[str, float]()
    for number in range(1, lab.plan.rounds + 1):
        results = [lab.train(c, strategy, number, parent, path, strategy) for c in CLIENTS]
        made = lab.aggregate(strategy, number, parent, path, strategy, results)
        parent, path = str(made["version"]), str(made["path"])
        errors.append(float(made["aggregation_error"]))
        heldout = lab.heldout(path)
        curve.append(mean(heldout))
    return {
        "curve": curve,
        "heldout": heldout,
        "aggregation_error": errors,
        "seconds": time.monotonic() - begun,
    }


def solo(lab: Lab, client: str, start: str) -> dict[str, Any]:
    """One client alone for as many steps; its adapter on all three domains."""
    name, parent, path, curve = f"solo-{client}", "start", start, list[float]()
    heldout = dict[str, float]()
    for number in range(1, lab.plan.rounds + 1):
        result = lab.train(client, name, number, parent, path, "fedavg")
        made = lab.aggregate(name, number, parent, path, "fedavg", [result])
        parent, path = str(made["version"]), str(made["path"])
        heldout = lab.heldout(path)
        curve.append(mean(heldout))
    return {"curve": curve, "heldout": heldout}


def mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)
