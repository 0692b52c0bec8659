"""Forward passes by the native kernels: a whole step in one call, on the weights as mapped.

Without a compiler (or on CUDA) the plain torch twin serves instead, slower; the log says so.
"""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.replica.engines.torch.config import ModelConfig
from services.replica.engines.torch.library import (
    LayerStruct,
    LoraStruct,
    ModelStruct,
    NoKernels,
    ScratchStruct,
    StepStruct,
    build,
)
from services.replica.engines.torch.lora import Adapter
from services.replica.engines.torch.step import Result, Step
from services.replica.weights import FusedWeights

WIDEST_HEAD = 512
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class _Table:
    """An adapter as the kernels read it, [layer][module]."""

    entries: Any


class NativeBackend:
    """Forward passes by the compiled kernels. KV memory in their layout."""

    reuse = True

    def __init__(
        self,
        config: ModelConfig,
        weights: FusedWeights,
        pages: int,
        threads: int,
        *,
        packed: bool = False,
        extra: tuple[str, ...] = (),
    ) -> None:
        embed = weights.fused["model.embed_tokens.weight"]
        self._config, self._keep = config, dict(weights.fused)
        self._dtype = embed.dtype
        _check_shapes(config, packed)
        self._library = build(self._dtype, extra)
        self.name = self._library.kernel_name().decode()
        self._scratch = ScratchStruct()
        self._scratches = {threads: self._scratch}  # each with its pool of that many threads
        self._model = self._describe(threads, packed)
        self._allocate(pages)

    def __del__(self) -> None:
        for scratch in getattr(self, "_scratches", {}).values():
            self._library.scratch_free(ctypes.byref(scratch))

    def forget(self, sequence: str) -> None:
        """Nothing is kept per sequence."""

    def use_threads(self, count: int) -> None:
        if count != self._model.threads:
            self._scratch = self._scratches.setdefault(count, ScratchStruct())
            self._model.threads = count
            self._model.scratch = ctypes.pointer(self._scratch)

    def _describe(self, threads: int, packed: bool) -> ModelStruct:
        c = self._config
        if not c.tied:
            head = "lm_head.weight"
        elif packed:
            head = "packed head"
            self._keep[head] = _pack(self._keep["model.embed_tokens.weight"])
        else:
            head = "model.embed_tokens.weight"
        if packed:
            for name, tensor in self._keep.items():
                if name.endswith("_proj.weight") or name == "lm_head.weight":
                    self._keep[name] = _pack(tensor)
        self._inverse = c.inverse_frequencies().contiguous()
        self._layers = (LayerStruct * c.layers)()
        return ModelStruct(
            hidden=c.hidden,
            inter=c.intermediate,
            layers=c.layers,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            vocab=c.vocabulary,
            threads=threads,
            packed=int(packed),
            eps=c.eps,
            embed=self._pointer("model.embed_tokens.weight"),
            head=self._pointer(head),
            norm=self._pointer("model.norm.weight"),
            inverse=self._inverse.data_ptr(),
            layer=self._layers,
            scratch=ctypes.pointer(self._scratch),
        )

    def _pointer(self, name: str) -> int | None:
        tensor = self._keep.get(name)
        if tensor is None:
            return None
        assert tensor.is_contiguous(), name
        assert tensor.dtype == self._dtype, name
        return tensor.data_ptr()

    def _allocate(self, pages: int) -> None:
        """KV memory (zeroed lazily by the system) and each layer's pointers."""
        c = self._config
        model = ctypes.byref(self._model)
        sizes = [self._library.key_page_elements(model), self._library.value_page_elements(model)]
        self._cache = [torch.zeros(c.layers, pages, n, dtype=self._dtype) for n in sizes]
        for i in range(c.layers):
            name = f"model.layers.{i}"
            self._layers[i] = LayerStruct(
                qkv=self._pointer(f"{name}.self_attn.qkv_proj.weight"),
                o=self._pointer(f"{name}.self_attn.o_proj.weight"),
                gate_up=self._pointer(f"{name}.mlp.gate_up_proj.weight"),
                down=self._pointer(f"{name}.mlp.down_proj.weight"),
                norm1=self._pointer(f"{name}.input_layernorm.weight"),
                norm2=self._pointer(f"{name}.post_attention_layernorm.weight"),
                bias=self._pointer(f"{name}.self_attn.qkv_proj.bias"),
                q_norm=self._pointer(f"{name}.self_attn.q_norm.weight"),
                k_norm=self._pointer(f"{name}.self_attn.k_norm.weight"),
                keys=self._cache[0][i].data_ptr(),
                values=self._cache[1][i].data_ptr(),
                window=c.windows[i],
            )

    def forward(self, step: Step) -> Result:
        count = len(step.logit_rows)
        best = np.zeros(count, np.int64)
        full = np.where(step.full, np.cumsum(step.full) - 1, -1).astype(np.int32)
        wanted = int(step.full.sum())
        logits = torch.empty(wanted, self._config.vocabulary) if wanted else None
        adapters, loras, numbers = self._tables(step)
        arrays = {
            "tokens": step.tokens,
            "starts": step.starts,
            "begins": step.begins,
            "tables": step.tables,
            "adapter": numbers,
            "logit_row": step.logit_rows,
            "full": full,
        }
        for name, array in arrays.items():
            assert array.dtype == np.int32, name
            assert array.flags.c_contiguous, name
        raw = StepStruct(
            rows=len(step.tokens),
            seqs=len(step.begins),
            table_stride=step.tables.shape[1],
            logit_rows=count,
            loras=ctypes.cast(loras, c_void_p),
            best=best.ctypes.data,
            logits=logits.data_ptr() if logits is not None else None,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        if self._library.forward(ctypes.byref(self._model), ctypes.byref(raw)):
            raise MemoryError("the kernels' scratch memory cannot be allocated")
        del adapters  # until here the kernels read them
        return Result(best, logits)

    def _tables(self, step: Step) -> tuple[list[Adapter], Any, np.ndarray[Any, Any]]:
        """The step's adapters, their tables, and each sequence's number among them."""
        own: dict[int, int] = {}
        adapters: list[Adapter] = []
        numbers = np.full(len(step.adapters), -1, np.int32)
        for s, adapter in enumerate(step.adapters):
            if adapter is not None:
                if adapter.uid not in own:
                    own[adapter.uid] = len(adapters)
                    adapters.append(adapter)
                numbers[s] = own[adapter.uid]
        tables = (c_void_p * max(len(adapters), 1))()
        for i, adapter in enumerate(adapters):
            if adapter.table is None:
                adapter.table = self._table(adapter)
            tables[i] = ctypes.addressof(adapter.table.entries)  # type: ignore[attr-defined]
        return adapters, tables, numbers

    def _table(self, adapter: Adapter) -> _Table:
        entries = (LoraStruct * (self._config.layers * len(MODULES)))()
        for layer in range(self._config.layers):
            for m, module in enumerate(MODULES):
                block = "self_attn" if m < 4 else "mlp"
                pair = adapter.modules.get(f"model.layers.{layer}.{block}.{module}")
                if pair is not None:
                    entries[layer * len(MODULES) + m] = LoraStruct(
                        a=pair.a.data_ptr(),
                        b=pair.b.data_ptr(),
                        rank=pair.a.shape[0],
                        scale=pair.scale,
                    )
        return _Table(entries)


def _check_shapes(c: ModelConfig, packed: bool) -> None:
    """The kernels work on whole tiles. Raises NoKernels."""
    rows = {"heads x head_dim": c.q_rows, "kv_heads x head_dim": c.kv_rows}
    columns = {"hidden": c.hidden, "intermediate": c.intermediate, "heads x head_dim": c.q_rows}
    for name, size in columns.items():
        if size % 32:
            raise NoKernels(f"{name} is {size}, no multiple of 32")
    for name, size in {**rows, "head_dim": c.head_dim}.items():
        if size % 16:
            raise NoKernels(f"{name} is {size}, no multiple of 16")
    if c.head_dim > WIDEST_HEAD:
        raise NoKernels(f"head_dim is {c.head_dim}, more than {WIDEST_HEAD}")
    if packed and c.vocabulary % 16:
        raise NoKernels(f"weights: packed needs a vocabulary in sixteens, not {c.vocabulary}")


def _pack(weight: Tensor) -> Tensor:
    """Tiles of 16 rows by 64 bytes one after the other (a second copy of the weights)."""
    rows, columns = weight.shape
    width = 64 // weight.element_size()
    tiles = weight.view(rows // 16, 16, columns // width, width).transpose(1, 2)
    return tiles.contiguous()
