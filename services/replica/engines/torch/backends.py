"""Which backend runs a model: native kernels, plain torch, or transformers' own forward."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from services.replica.engines.torch.config import ModelConfig, Unsupported, read_config
from services.replica.engines.torch.reference import TorchBackend
from services.replica.engines.torch.step import Backend
from services.replica.weights import open_fused, resolve_dtype

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A backend and what the engine must know of its model.

    ``shapes``: modules an adapter may target -> (outputs, inputs).
    """

    backend: Backend
    shapes: dict[str, tuple[int, int]]
    dtype: torch.dtype
    device: torch.device
    context: int
    vocabulary: int


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Transformers' module names -> (outputs, inputs)."""
    blocks = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
    return {
        f"model.layers.{layer}.{blocks.get(name, 'self_attn')}.{name}": shape
        for layer in range(config.layers)
        for name, shape in config.module_shapes().items()
    }


def load_backend(
    folder: Path, *, dtype: str, threads: int, pages: int, weights: str, kernels: str
) -> Loaded:
    """Open the model and choose how it runs. Raises WeightsError."""
    chosen = resolve_dtype(dtype)
    torch.set_num_threads(threads)
    config = read_config(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fused = open_fused(folder, chosen).to(device)
    backend: Backend = TorchBackend(config, fused, pages)
    return Loaded(backend, module_shapes(config), chosen, device, config.context, config.vocabulary)
