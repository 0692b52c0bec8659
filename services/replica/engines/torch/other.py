"""Models outside the family: transformers' own forward, one sequence after the other.

Slower, no prefix reuse, weights of its own; but every causal language model that transformers
knows runs, with adapters on its linear layers, behind the same engine.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.replica.engines.torch.lora import Adapter
from services.replica.engines.torch.step import Result, Step


class TransformersBackend:
    """A step through ``AutoModelForCausalLM``, with a cache of its own per sequence."""

    name = "transformers"
    reuse = False

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model.to(device).requires_grad_(False).eval()
        self._device = device
        # Newer releases of transformers call the argument ``cache``.
        known = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._caches: dict[str, Any] = {}
        self._adapter: Adapter | None = None
        self.shapes: dict[str, tuple[int, int]] = {}
        output = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Linear) and module is not output:
                self.shapes[name] = (module.out_features, module.in_features)
                module.register_forward_hook(self._hook(name))

    @property
    def context(self) -> int:
        config = self._model.config
        return int(getattr(config, "max_position_embeddings", 0) or config.n_positions)

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.vocab_size)

    def _hook(self, name: str) -> Any:
        """Adds the running sequence's adapter to a linear layer's output."""

        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            pair = self._adapter.modules.get(name) if self._adapter else None
            if pair is None:
                return output
            return output + (inputs[0] @ pair.a.T) @ pair.b.T * pair.scale

        return add

    def forget(self, sequence: str) -> None:
        self._caches.pop(sequence, None)

    def use_threads(self, count: int) -> None:
        if count != torch.get_num_threads():
            torch.set_num_threads(count)

    @torch.no_grad()
    def forward(self, step: Step) -> Result:
        rows = {int(row): i for i, row in enumerate(step.logit_rows)}
        logits = torch.empty(len(rows), self.vocabulary)
        for s, sequence in enumerate(step.ids):
            first, end = int(step.starts[s]), int(step.starts[s + 1])
            last = self._run(
                sequence, step.tokens[first:end], int(step.begins[s]), step.adapters[s]
            )
            if end - 1 in rows:
                logits[rows[end - 1]] = last
        best = logits.argmax(-1).numpy().astype(np.int64)
        full = torch.from_numpy(step.full)
        return Result(best, logits[full] if bool(full.any()) else None)

    def _run(
        self, sequence: str, tokens: np.ndarray[Any, Any], begin: int, adapter: Adapter | None
    ) -> Tensor:
        """Logits after the last of these tokens, which begin at position ``begin``."""
        from transformers import DynamicCache

        if begin == 0:
            self._caches[sequence] = DynamicCache(config=self._model.config)
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(self._device)
        self._adapter = adapter
        try:
            out = self._model(
                input_ids=ids,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._caches[sequence]},
            )
        finally:
            self._adapter = None
        last: Tensor = out.logits[0, -1].float().cpu()
        return last
