"""Training speed against a plain PEFT loop, and what 500 steps leave of the base weights."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from services.replica.training.data import Example, Stream
from services.replica.training.model import Adapter, LoraSpec, build_base
from services.replica.training.trainer import Plan, Trainer
from services.replica.weights import FusedWeights, open_fused

SPEC = LoraSpec(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj"))


def against_peft(
    folder: Path, examples: Sequence[Example], B: int, rounds: int, accumulation: int = 2
) -> dict[str, float]:
    """Tokens per second of both on the same batches in turn, bf16; median of their ratios."""
    plan = Plan(B=B, accumulation=accumulation)
    ours = Trainer(_adapter(folder), examples, plan)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = peft.get_peft_model(model, SPEC.peft_config())
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate)
    stream = Stream(examples, plan.seed)

    def plain() -> float:
        tokens, begun = 0, time.perf_counter()
        for _ in range(accumulation):
            batch = stream.take(B)
            out = model(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels)
            (out.loss / accumulation).backward()
            tokens += batch.tokens
        torch.nn.utils.clip_grad_norm_(parameters, plan.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return tokens / (time.perf_counter() - begun)

    def shared() -> float:
        begun = time.perf_counter()
        return ours.step().tokens / (time.perf_counter() - begun)

    pairs = [(shared(), plain()) for _ in range(rounds + 1)][1:]
    ratios = [a / b for a, b in pairs]
    return {
        "ours_tokens_s": statistics.median(a for a, _ in pairs),
        "peft_tokens_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_worst": min(ratios),
        "ratio_best": max(ratios),
    }


def base_after(folder: Path, examples: Sequence[Example], steps: int) -> dict[str, Any]:
    """Checksums of the mapped base before and after ``steps`` optimiser steps."""
    short = [Example(e.ids[-32:], e.learnt[-32:]) for e in examples]
    weights = open_fused(folder, "bfloat16")
    before = _checksum(weights)
    adapter = Adapter.attach(build_base(folder, weights.views), SPEC)
    start = adapter.flat.clone()
    trainer = Trainer(adapter, short, Plan(B=1, accumulation=1, learning_rate=1e-3))
    for _ in range(steps):
        trainer.step()
    return {
        "steps": steps,
        "base_unchanged": _checksum(weights) == before,
        "adapter_moved": not torch.equal(adapter.flat, start),
    }


def _adapter(folder: Path) -> Adapter:
    return Adapter.attach(build_base(folder, open_fused(folder, "bfloat16").views), SPEC)


def _checksum(weights: FusedWeights) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights.fused):
        digest.update(weights.fused[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()
