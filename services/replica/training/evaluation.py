"""Held-out cross-entropy of a version, for evaluation jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from services.replica.training.context import TrainingContext, read_tensors
from services.replica.training.data import Example
from services.replica.training.gate import ServingGate
from services.replica.training.trainer import Plan, Trainer
from shared import adapter_files
from shared.rounds import Lora


def cross_entropy(
    context: TrainingContext, path: str, examples: Sequence[Example], check: Callable[[], None]
) -> float:
    """Nats per answer token under the version in ``path``; "" is the base (an adapter with B = 0).

    Yields to serving like training does; ``check`` raises to end it early. Raises ModelError,
    adapter_files.BadFolder.
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
    )
    trainer = Trainer(adapter, examples, Plan(B=context.settings.micro_batch), gate)
    try:
        return trainer.evaluate(examples)
    finally:
        gate.release()
        trainer.close()
