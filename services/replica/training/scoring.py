"""Cross-entropy of reference answers under the adapter version that served each request.

Teacher forcing over the reference's tokens, the prompt excluded, in nats per token: the quality
measure of the paper's Q-goodput. Runs after a load test, away from serving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.replica.training.context import read_tensors
from services.replica.training.data import Example, collate, encode_chat
from services.replica.training.model import Adapter, LoraSpec, build_base, losses
from services.replica.weights import open_fused
from shared import adapter_files, chat
from shared.training_data import Chat

VERSION_HEADER = "x-collm-adapter-version"
BATCH_TOKENS = 4096  # padded tokens of one forward pass


@dataclass(frozen=True)
class Asked:
    """One answered request: which reference, under which adapter version ("" = the base)."""

    index: int
    sample: str
    adapter: str
    version: str


@dataclass(frozen=True)
class Scores:
    """Request index -> cross-entropy; and why others have none (reason -> how many)."""

    cross_entropy: dict[int, float]
    unscored: dict[str, int]


class Scorer:
    """A base model that takes one adapter version after another."""

    def __init__(self, folder: Path, *, dtype: str = "auto", cache: Path | None = None) -> None:
        self._tokenizer = chat.load(folder)
        self._base: nn.Module = build_base(folder, open_fused(folder, dtype, cache=cache).views)
        self._adapter: Adapter | None = None

    def example(self, messages: Sequence[Mapping[str, Any]], reference: str) -> Example:
        """Only the reference counts; answers that are part of the prompt do not."""
        asked = [dict(m, weight=0) if m["role"] == "assistant" else dict(m) for m in messages]
        answer = {"role": "assistant", "content": reference}
        return encode_chat(Chat((*asked, answer), 0), self._tokenizer)

    def use(self, version: Path | None) -> None:
        """Score under the adapter in this PEFT folder; None is the base model alone."""
        if version is None:
            self._detach()
            return
        card = adapter_files.read_card(version)
        spec = LoraSpec(card.rank, card.lora_alpha, card.target_modules)
        if self._adapter is None or self._adapter.spec != spec:
            self._detach()
            self._adapter = Adapter.attach(self._base, spec)
        self._adapter.load(read_tensors(version))

    def score(self, examples: Sequence[Example]) -> list[float]:
        """Mean cross-entropy of each example's learnt tokens, nats per token."""
        model: nn.Module = self._base if self._adapter is None else self._adapter.model
        model.eval()
        order = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))
        found = [0.0] * len(examples)
        with torch.no_grad():
            for part in _batches(order, [len(e.ids) for e in examples]):
                values, rows = losses(model, collate([examples[i] for i in part]))
                for row, index in enumerate(part):
                    found[index] = float(values[rows == row].mean())
        return found

    def _detach(self) -> None:
        if self._adapter is not None:
            self._base, self._adapter = self._adapter.detach(), None


def _batches(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Neighbours in ``order`` (shortest first) of at most BATCH_TOKENS padded tokens together."""
    out: list[list[int]] = []
    for index in order:
        if out and (len(out[-1]) + 1) * lengths[index] <= BATCH_TOKENS:
            out[-1].append(index)
        else:
            out.append([index])
    return out


def asked_of(result: Mapping[str, Any]) -> list[Asked]:
    """The answered requests of a detailed load generator result."""
    return [
        Asked(
            index=r["index"],
            sample=r["sample"] or "",
            adapter=r["model"],
            version=r["headers"].get(VERSION_HEADER, ""),
        )
        for r in result["requests"]
        if r["error"] is None
    ]


def score_result(
    result: Mapping[str, Any],
    scorer: Scorer,
    data_dir: Path,
    told: Callable[[str], None] = lambda line: None,
) -> Scores:
    """Score every answered request of ``result`` that has a reference and a version on disk."""
    references: Mapping[str, Any] = result["references"]
    unscored: dict[str, int] = {}
    groups: dict[tuple[str, str], list[Asked]] = {}
    for asked in asked_of(result):
        if asked.sample in references:
            key = (asked.adapter if asked.version else "", asked.version)
            groups.setdefault(key, []).append(asked)
        else:
            unscored["no reference"] = unscored.get("no reference", 0) + 1
    found: dict[int, float] = {}
    for (adapter, version), members in sorted(groups.items()):
        path = adapter_files.folder(data_dir, adapter, version) if version else None
        if path is not None and not path.is_dir():
            reason = f"version {version} of {adapter} is not on disk"
            unscored[reason] = unscored.get(reason, 0) + len(members)
            continue
        scorer.use(path)
        samples = sorted({m.sample for m in members})
        told(f"{adapter or 'base model'} {version}: {len(samples)} references")
        values = scorer.score(
            [scorer.example(references[s]["messages"], references[s]["reference"]) for s in samples]
        )
        by_sample = dict(zip(samples, values, strict=True))
        found |= {m.index: by_sample[m.sample] for m in members}
    return Scores(found, unscored)
