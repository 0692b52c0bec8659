"""The native kernels: compiled once with the C compiler that is there, called through ctypes.

``kernels/forward.c`` computes a whole step in one call, on the weights as they are mapped.
Without a compiler (or on CUDA) the plain torch twin serves instead, slower; the log says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.replica.engines.torch.config import ModelConfig
from services.replica.engines.torch.lora import Adapter
from services.replica.engines.torch.step import Result, Step
from services.replica.weights import FusedWeights
from shared.settings import user_cache

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
COMPILE_SECONDS = 600  # seconds of an idle machine are minutes of a busy one
WIDEST_HEAD = 512
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class NoKernels(RuntimeError):
    """The native kernels cannot serve here; the message says why."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "qkv o gate_up down norm1 norm2 bias q_norm k_norm keys values"),
        ("window", c_int64),
    )


class _Lora(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "a b"),
        ("rank", c_int64),
        *_fields(c_float, "scale unused"),
    )


class _Scratch(ctypes.Structure):
    _fields_ = (("memory", c_void_p), ("size", ctypes.c_size_t), ("pool", c_void_p))


class _Model(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "hidden inter layers heads kv_heads head_dim vocab threads packed"),
        *_fields(c_float, "eps unused"),
        *_fields(c_void_p, "embed head norm inverse"),
        ("layer", POINTER(_Layer)),
        ("scratch", POINTER(_Scratch)),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "rows seqs table_stride logit_rows"),
        *_fields(c_void_p, "tokens starts begins tables adapter logit_row full loras best logits"),
    )


@dataclass(frozen=True)
class _Table:
    """An adapter as the kernels read it, [layer][module]; and how it was made."""

    entries: Any


def build(dtype: torch.dtype, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library for ``dtype``, compiled where it is not there yet. Raises NoKernels."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise NoKernels("no C compiler (gcc, cc or clang) on the path")
    define = "-DBF16" if dtype == torch.bfloat16 else "-DFP32"
    flags = (*FLAGS, define, *extra)
    digest = hashlib.sha256(" ".join((compiler, *flags, _processor())).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            digest.update(source.read_bytes())
    name = f"forward-{digest.hexdigest()[:16]}.so"
    try:
        return _cached(user_cache() / "kernels" / name, compiler, flags)
    except OSError as e:
        log.info("no kernels in the user's cache (%s); they are compiled for this process", e)
    with tempfile.TemporaryDirectory(prefix="collm-kernels-") as folder:
        return _cached(Path(folder) / name, compiler, flags)  # stays mapped when the file goes


def _cached(path: Path, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _compile(compiler, flags, path)
    return _open(path)


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as file:
        temporary = Path(file.name)
    try:
        command = [compiler, *flags, str(SOURCES / "forward.c"), "-o", str(temporary), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as e:
            raise NoKernels(f"{compiler} took more than {COMPILE_SECONDS} s") from e
        if done.returncode:
            raise NoKernels(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.kernel_name.restype = c_char_p
    library.forward.argtypes = [POINTER(_Model), POINTER(_Step)]
    library.forward.restype = c_int
    for function in (library.key_page_elements, library.value_page_elements):
        function.argtypes, function.restype = [POINTER(_Model)], c_long
    library.scratch_free.argtypes = [POINTER(_Scratch)]
    if not library.kernel_ready():
        raise NoKernels("the system does not grant the tile registers (AMX)")
    return library


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
        self._scratch = _Scratch()
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
            self._scratch = self._scratches.setdefault(count, _Scratch())
            self._model.threads = count
            self._model.scratch = ctypes.pointer(self._scratch)

    def _describe(self, threads: int, packed: bool) -> _Model:
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
        self._layers = (_Layer * c.layers)()
        return _Model(
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
            self._layers[i] = _Layer(
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
        raw = _Step(
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
        entries = (_Lora * (self._config.layers * len(MODULES)))()
        for layer in range(self._config.layers):
            for m, module in enumerate(MODULES):
                block = "self_attn" if m < 4 else "mlp"
                pair = adapter.modules.get(f"model.layers.{layer}.{block}.{module}")
                if pair is not None:
                    entries[layer * len(MODULES) + m] = _Lora(
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
