"""Profiles of hardware nobody here has, derived from published figures by a roofline.

``python -m sim.roofline`` writes the derived files of ``config/profiles``. A decode iteration
reads all weights and the KV memory of every request once (memory bound); prefill and training
are bound by arithmetic. What each coefficient comes from, assumptions among it, is named in each
file, so that it can be derived again; a profile measured on the hardware itself
(``python -m bench.measured``) should replace the derived one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from shared.profile import PROFILES

DECODE_EFFICIENCY = 0.75  # share of peak memory bandwidth
PREFILL_EFFICIENCY = 0.55  # share of peak bf16 arithmetic
TRAIN_EFFICIENCY = 0.40
PAIR_EFFICIENCY = 0.90  # of two GPUs under tensor parallelism
STEP_OVERHEAD = 0.001  # seconds of launch and scheduling an iteration
CONTEXT_MEAN = 1200  # tokens held by a mean request of the Azure 2023 traces
TRAIN_TOKENS = 512  # tokens of a training sample
INTERFERENCE = 0.06  # growth of a decode iteration for each sample of a micro-batch beside it
INTERFERED = 0.01  # growth of a micro-step for each request beside it, in time of one sample
WEIGHT_PASSES = 2  # reads of all weights in a micro-step: forward and backward
KV_SHARE = 0.9  # of the memory that is used
WEIGHT_ROOM = 1.1  # times the weights that are not KV: activations, adapters
DISK = 0.6e9  # bytes/s at which weights are loaded
ADAPTER_SECONDS = 0.02
JITTER = 0.05
B_MAX = 256
OUTPUT_MEAN = 128.0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Peak figures of one GPU: TFLOP/s in bf16 without sparsity, TB/s, GB."""

    name: str
    tflops: float
    bandwidth: float
    memory: float
    source: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: parameters, bytes of KV memory a token (bf16)."""

    name: str
    parameters: float
    kv_bytes: int
    context: int
    vocabulary: int
    source: str


H20 = Gpu(
    name="h20",
    tflops=148,
    bandwidth=4.0,
    memory=96,
    source="NVIDIA H20 data sheet: 148 TFLOP/s bf16, 4.0 TB/s, 96 GB",
)
A100 = Gpu(
    name="a100",
    tflops=312,
    bandwidth=2.039,
    memory=80,
    source="NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16, 2,039 GB/s, 80 GB",
)
H100 = Gpu(
    name="h100",
    tflops=989,
    bandwidth=3.35,
    memory=80,
    source="NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 3.35 TB/s, 80 GB",
)
LLAMA_8B = Model(
    name="8b",
    parameters=8.03e9,
    kv_bytes=32 * 8 * 128 * 2 * 2,
    context=8192,
    vocabulary=128256,
    source="Llama 3 8B model card: 32 layers, 8 KV heads of 128, 8.03 B parameters",
)
LLAMA_13B = Model(
    name="13b",
    parameters=13.0e9,
    kv_bytes=40 * 40 * 128 * 2 * 2,
    context=4096,
    vocabulary=32000,
    source="Llama 2 13B model card: 40 layers, 40 heads of 128, 13.0 B parameters",
)


def derive(gpu: Gpu, model: Model, gpus: int) -> dict[str, Any]:
    """The profile as plain YAML data."""
    together = gpus * (PAIR_EFFICIENCY if gpus > 1 else 1.0)
    bandwidth = gpu.bandwidth * 1e12 * DECODE_EFFICIENCY * together
    flops = gpu.tflops * 1e12 * together
    weights = 2 * model.parameters
    alpha0 = weights / bandwidth + STEP_OVERHEAD
    kv_room = KV_SHARE * gpu.memory * 1e9 * gpus - weights * WEIGHT_ROOM
    coefficients = {
        "alpha0": alpha0,
        "alpha1": CONTEXT_MEAN * model.kv_bytes / bandwidth,
        "alpha2": INTERFERENCE * alpha0,
        "pi0": STEP_OVERHEAD,
        "pi1": 2 * model.parameters / (flops * PREFILL_EFFICIENCY),
        "pi2": INTERFERENCE * alpha0,
        "gamma0": WEIGHT_PASSES * weights / bandwidth,
        "gamma1": 4 * model.parameters * TRAIN_TOKENS / (flops * TRAIN_EFFICIENCY),
        "gamma2": INTERFERED * 4 * model.parameters * TRAIN_TOKENS / (flops * TRAIN_EFFICIENCY),
    }
    count = "two of them" if gpus == 2 else "one of them"
    return {
        "name": profile_name(gpu, model),
        "source": f"derived by sim/roofline.py from published figures ({count}); not measured",
        "coefficients": {k: float(f"{v:.4g}") for k, v in coefficients.items()},
        "b_max": B_MAX,
        "kv_tokens": int(kv_room / model.kv_bytes),
        "context": model.context,
        "vocabulary": model.vocabulary,
        "jitter": JITTER,
        "load_seconds": float(f"{weights / DISK:.3g}"),
        "adapter_seconds": ADAPTER_SECONDS,
        "merge_seconds": 0.02,
        "merged_speedup": 1.8,
        "output_mean": OUTPUT_MEAN,
        "numbers": _numbers(gpu, model, gpus),
    }


def _numbers(gpu: Gpu, model: Model, gpus: int) -> dict[str, str]:
    """Where each figure comes from: enough to derive it again by hand."""
    pair = {
        "pair": f"assumption: two GPUs under tensor parallelism have {PAIR_EFFICIENCY} of twice "
        "one's bandwidth and arithmetic; their memory adds up"
    }
    return {
        "gpu": gpu.source,
        "model": model.source,
        **(pair if gpus > 1 else {}),
        "alpha0": f"weights (2 bytes a parameter) once at {DECODE_EFFICIENCY} of peak bandwidth "
        f"+ {STEP_OVERHEAD * 1e3:g} ms a step",
        "alpha1": f"KV of {CONTEXT_MEAN} tokens (mean request of the Azure 2023 traces) at the "
        f"bandwidth of alpha0, {model.kv_bytes} bytes a token: keys and values, 2 bytes each",
        "alpha2": f"assumption: {INTERFERENCE} of alpha0 for each sample beside it",
        "pi0": f"assumption: {STEP_OVERHEAD * 1e3:g} ms of launch and scheduling a step",
        "pi1": f"2 FLOP a parameter and token at {PREFILL_EFFICIENCY} of peak",
        "pi2": "assumption: as alpha2",
        "gamma0": f"assumption: weights read {WEIGHT_PASSES} times (forward, backward) at the "
        "bandwidth of alpha0",
        "gamma1": f"LoRA: 4 FLOP a parameter and token, {TRAIN_TOKENS} tokens a sample, "
        f"{TRAIN_EFFICIENCY} of peak",
        "gamma2": f"assumption: {INTERFERED} of gamma1 for each request beside it",
        "b_max": "assumption",
        "kv_tokens": f"{KV_SHARE} of the memory less {WEIGHT_ROOM} times the weights, over the "
        "bytes a token of alpha1",
        "jitter": "assumption",
        "load_seconds": f"weights from disk at {DISK / 1e9:g} GB/s: about 27 s for 16 GB, near the "
        "30 s the CoLLM paper reports for a second copy of a 7B model",
        "adapter_seconds": "assumption: fetch of an adapter that is not resident",
        "merge": "dLoRA's artifact: switch 0.02 s, iteration merged 15 ms, unmerged 27 ms",
        "output_mean": "assumption; only where an emulated answer may end by itself",
    }


def profile_name(gpu: Gpu, model: Model) -> str:
    return f"{gpu.name}-{model.name}"


DERIVED = (
    (H20, LLAMA_8B, 2),
    (H20, LLAMA_13B, 2),
    (A100, LLAMA_8B, 1),
    (A100, LLAMA_13B, 1),
    (H100, LLAMA_8B, 1),
    (H100, LLAMA_13B, 1),
)


def write(folder: Path = PROFILES) -> list[Path]:
    """All derived profiles as files."""
    paths = []
    for gpu, model, gpus in DERIVED:
        path = folder / f"{profile_name(gpu, model)}.yaml"
        text = yaml.safe_dump(derive(gpu, model, gpus), sort_keys=False, width=96)
        path.write_text("# Written by `python -m sim.roofline`.\n" + text, encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    for written in write():
        print(written)
