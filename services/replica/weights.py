"""The base weights of a model: one file in fused order, mapped by every process of a host.

A checkpoint keeps q, k and v (gate and up) as separate tensors; an engine wants each group as
one matrix. So the checkpoint is rewritten once as a safetensors file in which the members of a
group lie side by side: the fused matrix and the members under transformers' names are then two
views of the same bytes. Each process maps the file privately (copy on write): inference and
training share the pages, and a stray write in one stays in that process. Where a file cannot be
mapped, on a GPU, one process holds its content and hands it to the others (``hand_over``).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.replica import checkpoint
from services.replica.checkpoint import WeightsError

log = logging.getLogger(__name__)

FORMAT = "1"
PAGE = 4096  # bytes; the header ends on a page
ALIGNMENT = 64  # bytes; each fused tensor begins on a cache line
GROUPS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_IN_FILE = {torch.bfloat16: "BF16", torch.float32: "F32"}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class FusedWeights:
    """A checkpoint's tensors, once fused and once under transformers' names (same memory).

    ``fused``: ``model.layers.0.self_attn.qkv_proj.weight`` [rows of q + k + v, hidden],
    ``model.layers.0.mlp.gate_up_proj.weight`` [2 x intermediate, hidden], biases likewise, and
    every other tensor under its own name. ``views``: ``…q_proj.weight`` and so on. All are views
    of ``whole`` [elements], the content of the fused file ``path``, its header included.
    """

    fused: dict[str, Tensor]
    views: dict[str, Tensor]
    path: Path
    whole: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the weights."""
        return sum(t.numel() * t.element_size() for t in self.fused.values())

    def to(self, device: torch.device | str) -> FusedWeights:
        """The same weights on ``device``, in one piece of memory there."""
        moved = self.whole.to(device)
        return self if moved is self.whole else cut(self.path, moved)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor lies in the file: bytes from the start of the data."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def resolve_device(device: str) -> torch.device:
    """``"auto"`` is the first GPU where there is one. Raises WeightsError: no such device."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as e:
        raise WeightsError(f"device {device!r}: choose auto, cpu, cuda or cuda:N") from e
    if chosen.type == "cpu":
        return chosen
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type != "cuda" or (chosen.index or 0) >= count:
        raise WeightsError(f"device {device!r}: this process sees {count} CUDA devices")
    return torch.device("cuda", chosen.index or 0)


def resolve_dtype(dtype: str | torch.dtype, device: str = "auto") -> torch.dtype:
    """``"auto"`` is bf16 where the hardware of ``device`` multiplies it natively, else fp32."""
    if isinstance(dtype, torch.dtype):
        chosen = dtype
    elif dtype == "auto":
        on_gpu = resolve_device(device).type == "cuda"
        native = on_gpu or torch.cpu._is_avx512_bf16_supported()
        chosen = torch.bfloat16 if native else torch.float32
    elif dtype in DTYPES:
        chosen = DTYPES[dtype]
    else:
        raise WeightsError(f"dtype {dtype!r}: choose auto, {' or '.join(DTYPES)}")
    if chosen not in _IN_FILE:
        raise WeightsError(f"dtype {chosen}: choose torch.bfloat16 or torch.float32")
    return chosen


def open_fused(
    folder: str | Path, dtype: str | torch.dtype = "auto", *, cache: str | Path | None = None
) -> FusedWeights:
    """Map the fused file of the checkpoint in ``folder``, writing it first where needed.

    The file lies in ``cache`` (default: the folder itself) and is written again when the
    checkpoint's files change. Concurrent callers write it once. Raises WeightsError.
    """
    folder, chosen = Path(folder), resolve_dtype(dtype)
    target = Path(cache or folder) / f"fused-{str(chosen).removeprefix('torch.')}.safetensors"
    fingerprint = checkpoint.fingerprint(folder, FORMAT)
    if not _is_current(target, fingerprint):
        with _lock(target):
            if not _is_current(target, fingerprint):
                _write(folder, target, chosen, fingerprint)
    return _map(target, chosen)


def _is_current(target: Path, fingerprint: str) -> bool:
    if not target.exists():
        return False
    try:
        header = _header(target)
    except (ValueError, struct.error, MemoryError):
        return False  # cut short or not ours: it is written anew
    return bool(header.get("__metadata__", {}).get("source") == fingerprint)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    return header


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One writer a host; the lock goes with the process that holds it."""
    try:
        handle = os.open(target.with_name(f".{target.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as e:
        raise WeightsError(
            f"{target.parent}: cannot write the fused weights there ({e.strerror}); make the "
            "model's folder writable or choose another one for the cache"
        ) from e
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def group_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The fused name of a member of a group and all its members' names; None for others."""
    for fused, members in GROUPS.items():
        for member in members:
            if f".{member}." in name:
                prefix, suffix = name.split(f".{member}.", 1)
                names = tuple(f"{prefix}.{m}.{suffix}" for m in members)
                return f"{prefix}.{fused}.{suffix}", names
    return None


def _order(shapes: Mapping[str, tuple[Path, tuple[int, ...]]]) -> list[tuple[str, ...]]:
    """Tensors in file order, those of a complete group with equal columns together."""
    order: list[tuple[str, ...]] = []
    placed: set[str] = set()
    for name in sorted(shapes):
        if name in placed:
            continue
        group = group_of(name)
        members = group[1] if group else (name,)
        complete = all(m in shapes for m in members)
        if not complete or len({shapes[m][1][1:] for m in members}) != 1:
            members = (name,)
        order.append(members)
        placed.update(members)
    return order


def _layout(shapes: Mapping[str, tuple[Path, tuple[int, ...]]], itemsize: int) -> list[_Slot]:
    """Slots of all tensors, with fillers so that each group begins on a cache line."""
    slots: list[_Slot] = []
    position = 0
    for members in _order(shapes):
        if position % ALIGNMENT:
            end = position + ALIGNMENT - position % ALIGNMENT
            slots.append(_Slot(f"_fill.{position}", ((end - position) // itemsize,), position, end))
            position = end
        for name in members:
            shape = shapes[name][1]
            size = torch.Size(shape).numel() * itemsize
            slots.append(_Slot(name, shape, position, position + size))
            position += size
    return slots


def _write(folder: Path, target: Path, dtype: torch.dtype, fingerprint: str) -> None:
    """Write the whole file beside its place, then rename it: readers see all of it or nothing."""
    shapes = checkpoint.shapes(folder)
    slots = _layout(shapes, dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "source": fingerprint}}
    for slot in slots:
        header[slot.name] = {
            "dtype": _IN_FILE[dtype],
            "shape": slot.shape,
            "data_offsets": [slot.begin, slot.end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for slot in slots:
                out.write(_bytes(slot, shapes, dtype))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    log.info("wrote %s, the weights in fused order", target)


def _bytes(
    slot: _Slot, shapes: Mapping[str, tuple[Path, tuple[int, ...]]], dtype: torch.dtype
) -> memoryview:
    if slot.name not in shapes:
        return memoryview(bytes(slot.end - slot.begin))
    with safe_open(shapes[slot.name][0], "pt") as reader:
        tensor = reader.get_tensor(slot.name)
    if not tensor.is_floating_point():
        raise WeightsError(f"{shapes[slot.name][0]}: {slot.name} is {tensor.dtype}: quantised?")
    return memoryview(tensor.to(dtype).contiguous().view(torch.uint8).numpy().reshape(-1))


def _map(path: Path, dtype: torch.dtype) -> FusedWeights:
    """Map the file privately and cut it into tensors."""
    size = path.stat().st_size // dtype.itemsize
    return cut(path, torch.from_file(str(path), shared=False, size=size, dtype=dtype))


def cut(path: Path, whole: Tensor) -> FusedWeights:
    """The tensors of the fused file at ``path``; ``whole`` [elements] is its content, anywhere."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
    header = _header(path)
    header.pop("__metadata__")
    itemsize = whole.element_size()
    data = whole[(size + 8) // itemsize :]
    views = {
        name: data[
            entry["data_offsets"][0] // itemsize : entry["data_offsets"][1] // itemsize
        ].view(entry["shape"])
        for name, entry in header.items()
        if not name.startswith("_fill.")
    }
    fused: dict[str, Tensor] = {}
    for members in _order({name: (path, tuple(t.shape)) for name, t in views.items()}):
        if len(members) == 1:
            fused[members[0]] = views[members[0]]
            continue
        group = group_of(members[0])
        assert group is not None
        first = views[members[0]]
        rows = sum(views[m].shape[0] for m in members)
        begin = first.storage_offset() - data.storage_offset()
        count = rows * (first.numel() // first.shape[0])
        fused[group[0]] = data[begin : begin + count].view(rows, *first.shape[1:])
    return FusedWeights(fused, views, path, whole)
