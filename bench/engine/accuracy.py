"""Unmerged against merged adapters: the output distributions and the task's loss, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.replica.adapters import Modules, read_folder
from services.replica.engines.torch.backends import module_shapes
from services.replica.engines.torch.config import read_config
from services.replica.engines.torch.kv import PAGE
from services.replica.engines.torch.lora import Adapter, AdapterStore
from services.replica.engines.torch.native import NativeBackend
from services.replica.engines.torch.step import Step
from services.replica.weights import FusedWeights, cut, open_fused


def compare(
    folder: Path, adapter: Path, texts: list[list[int]], dtype: torch.dtype, threads: int
) -> dict[str, float]:
    """Mean KL(unmerged, merged) a token in nats, and both's cross-entropy on ``texts``."""
    config = read_config(folder)
    shapes = module_shapes(config)
    weights = open_fused(folder, dtype)
    pages = -(-max(map(len, texts)) // PAGE)
    modules = read_folder(adapter, shapes)
    store = AdapterStore(shapes, dtype, torch.device("cpu"))
    store.load("a", "1", str(adapter))
    loaded = store.acquire("a", None)
    unmerged = NativeBackend(config, weights, pages, threads)
    merged = NativeBackend(config, merge(weights, modules), pages, threads)
    kl, count = 0.0, 0
    loss = {"unmerged": 0.0, "merged": 0.0}
    for text in texts:
        p = _log_probabilities(unmerged, text, loaded)
        q = _log_probabilities(merged, text, None)
        kl += float((p.exp() * (p - q)).sum())
        target = torch.tensor(text[1:])[:, None]
        loss["unmerged"] -= float(p[:-1].gather(1, target).sum())
        loss["merged"] -= float(q[:-1].gather(1, target).sum())
        count += len(text)
    tokens = count - len(texts)
    return {
        "kl": kl / count,
        "loss_unmerged": loss["unmerged"] / tokens,
        "loss_merged": loss["merged"] / tokens,
    }


def merge(weights: FusedWeights, modules: Modules) -> FusedWeights:
    """A copy of the weights with the adapter added, rounded to their dtype."""
    result = cut(weights.path, weights.whole.clone())
    for module, lora in modules.items():
        view = result.views[f"{module}.weight"]
        view.copy_(view.float() + lora.scale * (lora.b @ lora.a))
    return result


def _log_probabilities(backend: Any, text: list[int], adapter: Adapter | None) -> Tensor:
    """fp32 [tokens, vocabulary] after each token."""
    size = len(text)
    step = Step(
        tokens=np.array(text, np.int32),
        starts=np.array([0, size], np.int32),
        begins=np.zeros(1, np.int32),
        tables=np.arange(-(-size // PAGE), dtype=np.int32)[None],
        adapters=[adapter],
        logit_rows=np.arange(size, dtype=np.int32),
        full=np.ones(size, np.bool_),
        ids=[""],
    )
    logits = backend.forward(step).logits
    assert logits is not None
    return torch.log_softmax(logits.double(), -1)
