"""What the machine could do: its read bandwidth and its matrix speed, measured now."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from services.replica.engines.torch.config import ModelConfig


@dataclass(frozen=True)
class Limits:
    """Bytes a second read by all threads; floating point operations a second in GEMM."""

    bandwidth: float
    flops: float


def measure(threads: int, dtype: torch.dtype) -> Limits:
    """Best of several runs of a sum over 512 MB and a product of 2048-squares."""
    torch.set_num_threads(threads)
    data = torch.ones(64 << 20, dtype=torch.int64)
    a = torch.ones(2048, 2048, dtype=dtype)
    bandwidth = data.nbytes / min(_time(data.sum) for _ in range(8))
    return Limits(bandwidth, 2 * 2048**3 / min(_time(lambda: a @ a) for _ in range(8)))


def _time(call: object) -> float:
    assert callable(call)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def parameters(c: ModelConfig) -> int:
    """Weights every token is multiplied with (the output layer included)."""
    linear = sum(rows * columns for rows, columns in c.module_shapes().values())
    return linear * c.layers + c.vocabulary * c.hidden


def bound(c: ModelConfig, limits: Limits, itemsize: int, b: int, length: int) -> float:
    """Least seconds of a decode step of ``b`` sequences: memory or arithmetic, whichever rules.

    Every weight is read once, and every key and value of the sequences' ``length`` tokens.
    """
    kv = 2 * c.layers * c.kv_rows * length * b
    weights = parameters(c)
    moved = (weights + kv) * itemsize / limits.bandwidth
    return max(moved, 2 * weights * b / limits.flops)
