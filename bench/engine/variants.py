"""One adapter served in four ways, side by side: what each costs in speed.

``base``: no adapter; ``merged``: added to a copy of the weights; ``unmerged``: beside the weights,
as this engine serves; ``shadow``: unmerged, and a new version published before every step, as
while training; ``packed``: unmerged, on a second copy of the weights in the kernels' order.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.engine import jobs
from bench.engine.accuracy import merge
from bench.flat import flatten
from services.replica.adapters import read_folder, read_spec
from services.replica.engines.torch import TorchEngine
from services.replica.engines.torch.backends import module_shapes
from services.replica.engines.torch.config import read_config
from services.replica.engines.torch.kv import PAGE
from services.replica.engines.torch.native import NativeBackend
from services.replica.weights import open_fused
from shared.adapter_files import TENSOR_FILE

NAMES = ("base", "merged", "unmerged", "shadow", "packed")
KV_TOKENS = 16384


class Variants:
    """The engines, loaded once; ``compare`` runs them in turn."""

    def __init__(self, folder: Path, adapter: Path, dtype: torch.dtype, threads: int) -> None:
        self._adapter = adapter
        plain = self._engine(folder, dtype, threads, "shared")
        merged = self._engine(folder, dtype, threads, "shared")
        config = read_config(folder)
        modules = read_folder(adapter, module_shapes(config))
        weights = merge(open_fused(folder, dtype), modules)
        merged.backend = NativeBackend(config, weights, KV_TOKENS // PAGE, threads)
        self._engines = {
            "base": plain,
            "merged": merged,
            "unmerged": plain,
            "shadow": plain,
            "packed": self._engine(folder, dtype, threads, "packed"),
        }
        for engine in (plain, self._engines["packed"]):
            engine.load_adapter("a", "0", str(adapter))
        self._versions = itertools.count(1)

    @staticmethod
    def _engine(folder: Path, dtype: torch.dtype, threads: int, weights: str) -> TorchEngine:
        return TorchEngine.load(
            folder,
            name="model",
            dtype=str(dtype).removeprefix("torch."),
            threads=threads,
            kv_tokens=KV_TOKENS,
            weights=weights,
            prefix_cache=False,
        )

    def compare(
        self, prompts: list[list[int]], tokens: int, concurrency: int, rounds: int
    ) -> dict[str, float]:
        """Median output tokens/s of each way. Give more prompts than ``concurrency``: requests
        that come in later begin with a newer version."""
        flat, bounds = flatten(load_file(self._adapter / TENSOR_FILE))
        spec, shadowed = read_spec(self._adapter), self._engines["shadow"]

        def publish() -> None:  # as the serving loop takes it from the shared memory
            version = str(next(self._versions))
            shadowed.load_adapter_flat("a", version, flat, bounds, spec, str(self._adapter))

        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for name in NAMES * rounds:
            engine = self._engines[name]
            engine.configure(b=concurrency)
            done = jobs.run(
                engine,
                prompts,
                tokens,
                adapter=None if name in ("base", "merged") else "a",
                before_step=publish if name == "shadow" else lambda: None,
            )
            seconds[name].append(done.seconds)
        made = len(prompts) * tokens
        return {name: round(made / statistics.median(s), 1) for name, s in seconds.items()}

    def close(self) -> None:
        for engine in set(self._engines.values()):
            engine.close()
