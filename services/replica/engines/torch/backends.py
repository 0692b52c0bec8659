"""Which backend runs a model: native kernels, plain torch, or transformers' own forward."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from services.replica.engines.torch.config import ModelConfig, Unsupported, read_config
from services.replica.engines.torch.library import NoKernels
from services.replica.engines.torch.native import NativeBackend
from services.replica.engines.torch.other import TransformersBackend
from services.replica.engines.torch.reference import TorchBackend
from services.replica.engines.torch.step import Backend
from services.replica.hand_over import Handle, receive
from services.replica.lane import Lane
from services.replica.weights import FusedWeights, open_fused, resolve_device, resolve_dtype

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
    lane: Lane
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
    folder: Path,
    *,
    dtype: str,
    threads: int,
    pages: int,
    weights: str,
    kernels: str,
    cache: str | Path | None = None,
    device: str = "auto",
    held: Handle | None = None,
) -> Loaded:
    """Open the model and choose how it runs. Raises WeightsError, NoKernels."""
    if held is not None:
        dtype, device = held.dtype, held.device
    if weights not in ("shared", "packed"):
        raise ValueError(f"weights {weights!r}: choose shared or packed")
    if kernels not in ("auto", "native", "torch"):
        raise ValueError(f"kernels {kernels!r}: choose auto, native or torch")
    chosen = resolve_dtype(dtype, device)
    torch.set_num_threads(threads)
    place = resolve_device(device)
    lane = Lane(place, urgent=True)
    try:
        config = read_config(folder)
    except Unsupported as e:
        log.warning("transformers' own forward computes, slower and without sharing: %s", e)
        with lane():
            other = TransformersBackend(folder, chosen, place)
        shapes, context, vocabulary = other.shapes, other.context, other.vocabulary
        return Loaded(other, shapes, chosen, place, lane, context, vocabulary)
    with lane():
        fused = receive(held) if held else open_fused(folder, chosen, cache=cache).to(place)
        backend = _choose(config, fused, pages, threads, weights, kernels)
    shapes = module_shapes(config)
    return Loaded(backend, shapes, chosen, place, lane, config.context, config.vocabulary)


def _choose(
    config: ModelConfig,
    fused: FusedWeights,
    pages: int,
    threads: int,
    weights: str,
    kernels: str,
) -> Backend:
    """Native kernels on a CPU where they can be had, else plain torch."""
    on_cpu = fused.fused["model.embed_tokens.weight"].device.type == "cpu"
    if kernels == "torch" or not on_cpu:
        return TorchBackend(config, fused, pages)
    try:
        backend = NativeBackend(config, fused, pages, threads, packed=weights == "packed")
    except NoKernels as e:
        if kernels == "native" or weights == "packed":
            raise
        log.warning("plain torch computes, several times slower than native kernels: %s", e)
        return TorchBackend(config, fused, pages)
    log.info("native kernels (%s), %d threads", backend.name, threads)
    return backend
