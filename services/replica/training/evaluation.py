"""Held-out cross-entropy of a version: for evaluation jobs, and by itself while nothing runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
from redis.exceptions import RedisError

from services.replica.training.context import TrainingContext, read_tensors
from services.replica.training.data import Example
from services.replica.training.gate import ServingGate, Stopped
from services.replica.training.model import ModelError
from services.replica.training.trainer import Plan, Trainer
from shared import adapter_files, data_homes, names
from shared.messages import QualitySample
from shared.rounds import Lora
from shared.training_data import DataError

log = logging.getLogger(__name__)


def cross_entropy(
    context: TrainingContext,
    path: str,
    examples: Sequence[Example],
    check: Callable[[], None],
    *,
    probe: bool = False,
) -> float:
    """Nats per answer token under the version in ``path``; "" is the base (an adapter with B = 0).

    Yields to serving like training does; ``check`` raises to end it early. A ``probe`` also runs
    while B = 0. Raises ModelError, adapter_files.BadFolder.
    """
    if path:
        card = adapter_files.read_card(Path(path))
        lora = Lora(rank=card.rank, lora_alpha=card.lora_alpha, target_modules=card.target_modules)
        adapter = context.adapter(lora)
        adapter.load(read_tensors(Path(path)))
    else:
        adapter = context.fresh_adapter(Lora(), 0)
    gate = ServingGate(
        context.block,
        context.slots,
        check,
        threads=context.threads,
        yielding=context.settings.yielding,
        layers=adapter.model.config.num_hidden_layers,
        device=context.device,
        needs_micro_batch=not probe,
    )
    trainer = Trainer(adapter, examples, Plan(B=context.settings.micro_batch), gate)
    try:
        return trainer.evaluate(examples)
    finally:
        gate.release()
        trainer.close()


class Probes:
    """Scores each version that this replica serves once, on its own held-out data, while no job
    runs and serving has slack; at most one probe an interval."""

    def __init__(self, context: TrainingContext, busy: Callable[[], bool]) -> None:
        """``busy`` says whether a job waits: a probe then ends at once."""
        self._context, self._busy = context, busy
        self._done: set[tuple[str, str]] = set()
        self._last = time.monotonic()

    def turn(self) -> QualitySample | None:
        """One probe if one is due; publishes and returns its sample. Never raises for a bad
        version or bad data: a probe is an extra."""
        interval = self._context.settings.probe_interval
        if not interval or time.monotonic() - self._last < interval or self._busy():
            return None
        self._last = time.monotonic()
        try:
            return self._probe()
        except Stopped:
            return None  # a job came; the version is probed another time
        except (ModelError, DataError, RedisError, OSError, ValueError) as e:
            log.warning("no quality probe: %s", e)
            return None

    def _probe(self) -> QualitySample | None:
        context, settings = self._context, self._context.settings
        for adapter, version in self._served().items():
            if (adapter, version) in self._done:
                continue
            self._done.add((adapter, version))
            path = adapter_files.folder(Path(context.config.data_dir), adapter, version)
            data = context.data_set(adapter, settings.max_length, settings.heldout)
            if data is None or not data.heldout.examples or not path.is_dir():
                continue
            examples = data.heldout.examples[: settings.heldout_limit]
            context.synchronise()
            sample = QualitySample(
                replica=context.config.replica,
                adapter=adapter,
                version=version,
                time=context.now(),
                ce=cross_entropy(context, str(path), examples, self._check, probe=True),
                tokens=sum(sum(e.learnt[1:]) for e in examples),
            )
            context.metric("quality", sample)
            return sample
        return None

    def _served(self) -> dict[str, str]:
        """Adapter -> version that this replica gives new requests, for those with data here."""
        context = self._context
        raw: Any = context.redis.hget(names.replica(context.config.replica), "adapters")
        served: dict[str, str] = orjson.loads(raw) if raw else {}
        home = Path(context.config.data_dir)
        return {
            adapter: version
            for adapter, version in served.items()
            if data_homes.files(home, context.config.replica, adapter)
        }

    def _check(self) -> None:
        if self._busy():
            raise Stopped("a job waits")
