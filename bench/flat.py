"""An adapter's tensors as one array, as training publishes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Bounds = dict[str, tuple[int, int, tuple[int, ...]]]


def flatten(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Bounds]:
    """All of them in fp32, one after another, and name -> (begin, end, shape) in it."""
    bounds, at = Bounds(), 0
    for name, tensor in tensors.items():
        bounds[name] = (at, at + tensor.numel(), tuple(tensor.shape))
        at += tensor.numel()
    return torch.cat([tensor.float().reshape(-1) for tensor in tensors.values()]), bounds
