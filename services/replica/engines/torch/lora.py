"""Resident adapters: unmerged LoRA weights in the engine's dtype, picked per sequence.

A resident adapter is one flat buffer, cut into A [rank, inputs] and B [outputs, rank] of each
layer. It is kept while a sequence uses it, and otherwise until its slot is needed (least
recently used first); the folder it came from stays known, so it comes back when asked for.
The base weights never change.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from services.replica.adapters import (
    AdapterSpec,
    Modules,
    module_of,
    read_folder,
    read_tensors,
)
from services.replica.engines.base import AdapterError, Rejected
from services.replica.lane import Lane

log = logging.getLogger(__name__)

SLOTS = 64


@dataclass(frozen=True)
class Pair:
    """A and B of one module, in the engine's dtype, and the scale of their product."""

    a: Tensor
    b: Tensor
    scale: float


Packed = tuple[dict[str, Pair], Tensor]  # by module, views of the buffer


@dataclass(eq=False)
class Adapter:
    """One version of an adapter in memory. ``uid`` names its content, never used twice."""

    uid: int
    name: str
    version: str
    modules: dict[str, Pair]  # "model.layers.0.self_attn.q_proj" -> pair
    buffer: Tensor
    path: str | None
    users: int = 0
    table: object = field(default=None, repr=False)  # what a backend derived from it

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


Bounds = Mapping[str, tuple[int, int, tuple[int, ...]]]  # PEFT's name -> begin, end, shape


@dataclass(frozen=True)
class Layout:
    """Where the matrices of an accepted adapter lie in its flat form."""

    bounds: Bounds
    spec: AdapterSpec
    places: dict[str, tuple[str, str, float]]  # module -> names of A and B, scale


class AdapterStore:
    """Names, versions and resident adapters; 64 slots."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        slots: int = SLOTS,
        dropped: Callable[[int], None] = lambda uid: None,
        lane: Lane | None = None,
    ) -> None:
        self._shapes = shapes
        self._lane = lane or Lane(device, urgent=True)
        self._dtype, self._device = dtype, device
        self._slots = slots
        self._dropped = dropped
        self._uids = 0
        self._resident: OrderedDict[tuple[str, str], Adapter] = OrderedDict()  # oldest use first
        self._paths: dict[tuple[str, str], str] = {}
        self.current: dict[str, str] = {}  # name -> version given to new requests
        self._layout: Layout | None = None  # of the last flat adapter

    @property
    def resident(self) -> list[tuple[str, str]]:
        return list(self._resident)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._resident.values())

    def load(self, name: str, version: str, path: str, *, current: bool = True) -> None:
        """Read a PEFT folder; new requests for ``name`` get it. Raises AdapterError.

        ``current=False``: only requests pinned to the version get it, unless it is the first.
        """
        modules = read_folder(path, self._shapes)
        if current or name not in self.current:
            self._put(name, version, self._pack(modules), path)
        else:
            self._insert(name, version, self._pack(modules), path)
        self._paths[name, version] = path

    def has(self, name: str, version: str | None) -> bool:
        """Whether ``acquire`` would find the version, in memory or by a path it knows."""
        if name not in self.current:
            return False
        key = (name, version or self.current[name])
        return key in self._resident or key in self._paths or self._beside(*key) is not None

    def load_tensors(
        self,
        name: str,
        version: str,
        tensors: Mapping[str, Tensor],
        spec: AdapterSpec,
        path: str | None = None,
    ) -> None:
        """The same from memory; ``path``: where the version lies on disk too, if it does."""
        source = f"adapter {name} version {version}"
        modules = read_tensors(tensors, spec, self._shapes, source=source)
        self._put(name, version, self._pack(modules), path)
        if path is not None:
            self._paths[name, version] = path

    def load_flat(
        self,
        name: str,
        version: str,
        flat: Tensor,
        bounds: Bounds,
        spec: AdapterSpec,
        path: str | None = None,
    ) -> None:
        """``load_tensors`` for tensors that lie one after another in ``flat``.

        Serving waits meanwhile, so a layout that was checked before is taken over whole: one
        copy instead of one a matrix (1 ms instead of 20).
        """
        layout = self._layout
        known = layout is not None and layout.bounds == bounds and layout.spec == spec
        # A sum is finite only if every number is.
        if layout is None or not known or not math.isfinite(float(flat.sum())):
            tensors = {n: flat[a:b].view(shape) for n, (a, b, shape) in bounds.items()}
            self.load_tensors(name, version, tensors, spec, path)
            self._layout = self._layout_of(name, version, bounds, spec)
            return
        self._put(name, version, self._pack_flat(flat, layout), path)
        if path is not None:
            self._paths[name, version] = path

    def _layout_of(self, name: str, version: str, bounds: Bounds, spec: AdapterSpec) -> Layout:
        """Of the version that has just been accepted."""
        pairs = self._resident[name, version].modules
        found: dict[str, dict[str, str]] = {}
        for tensor in bounds:
            module, part = module_of(tensor)
            found.setdefault(module, {})[part] = tensor
        places = {m: (parts["A"], parts["B"], pairs[m].scale) for m, parts in found.items()}
        return Layout(dict(bounds), spec, places)

    def unload(self, name: str) -> bool:
        """New requests for ``name`` are refused; its memory goes with its last user."""
        if self.current.pop(name, None) is None:
            return False
        for key in [k for k in self._paths if k[0] == name]:
            del self._paths[key]
        for key in [k for k in self._resident if k[0] == name]:
            self._drop_if_unused(key)
        return True

    def acquire(self, name: str, version: str | None) -> Adapter:
        """The adapter for a new request; a pinned version may be an older one. Raises Rejected."""
        if name not in self.current:
            raise Rejected(
                f"adapter {name!r} is not loaded here", status=404, code="model_not_found"
            )
        wanted = version or self.current[name]
        key = (name, wanted)
        adapter = self._resident.get(key)
        if adapter is None:
            adapter = self._bring_back(name, wanted)
        adapter.users += 1
        self._resident.move_to_end(key)
        return adapter

    def release(self, adapter: Adapter) -> None:
        """A sequence has ended. An old version without users leaves memory."""
        adapter.users -= 1
        key = (adapter.name, adapter.version)
        if self._resident.get(key) is adapter and self.current.get(adapter.name) != key[1]:
            self._drop_if_unused(key)
        elif self._resident.get(key) is not adapter and not adapter.users:
            self._dropped(adapter.uid)

    def _bring_back(self, name: str, version: str) -> Adapter:
        path = self._paths.get((name, version)) or self._beside(name, version)
        if path is None:
            raise Rejected(
                f"adapter {name!r} has no version {version!r} here",
                status=409,
                code="adapter_version_gone",
            )
        try:
            modules = read_folder(path, self._shapes)
        except AdapterError as e:
            raise Rejected(str(e), status=409, code="adapter_version_gone") from e
        return self._insert(name, version, self._pack(modules), path)

    def _beside(self, name: str, version: str) -> str | None:
        """Versions of an adapter lie in one folder: another version's folder of that name."""
        path = self._paths.get((name, self.current[name]))
        if path is None or "/" in version or version in ("", ".", ".."):
            return None
        beside = Path(path).parent / version
        return str(beside) if beside.is_dir() else None

    def _put(self, name: str, version: str, packed: Packed, path: str | None) -> None:
        self._insert(name, version, packed, path)
        before = self.current.get(name)
        self.current[name] = version
        if before is not None and before != version:
            self._drop_if_unused((name, before))

    def _insert(self, name: str, version: str, packed: Packed, path: str | None) -> Adapter:
        key = (name, version)
        replaced = self._resident.pop(key, None)  # its users keep the object itself
        if replaced is not None and not replaced.users:
            self._dropped(replaced.uid)
        self._make_room()
        self._uids += 1
        adapter = Adapter(self._uids, name, version, *packed, path)
        self._resident[key] = adapter
        return adapter

    def _make_room(self) -> None:
        while len(self._resident) >= self._slots:
            for key, adapter in self._resident.items():
                on_disk = key in self._paths
                if not adapter.users and (on_disk or self.current.get(key[0]) != key[1]):
                    self._drop_if_unused(key)
                    break
            else:
                raise AdapterError(f"all {self._slots} adapter slots are in use; try again later")

    def _drop_if_unused(self, key: tuple[str, str]) -> None:
        adapter = self._resident.get(key)
        if adapter is not None and not adapter.users:
            del self._resident[key]
            self._dropped(adapter.uid)

    def _pack(self, modules: Modules) -> Packed:
        """One buffer for all matrices: a single allocation that goes as one."""
        at, pairs = 0, {}
        with self._lane():
            buffer = self._buffer(sum(lora.a.numel() + lora.b.numel() for lora in modules.values()))
            for module, lora in modules.items():
                cut = []
                for tensor in (lora.a, lora.b):
                    view = buffer[at : at + tensor.numel()].view(tensor.shape)
                    view.copy_(tensor)
                    cut.append(view)
                    at += tensor.numel()
                pairs[module] = Pair(cut[0], cut[1], lora.scale)
        return pairs, buffer

    def _pack_flat(self, flat: Tensor, layout: Layout) -> Packed:
        with self._lane():
            buffer = self._buffer(flat.numel())
            buffer[: flat.numel()].copy_(flat)
        views = {n: buffer[a:b].view(shape) for n, (a, b, shape) in layout.bounds.items()}
        places = layout.places.items()
        return {m: Pair(views[a], views[b], scale) for m, (a, b, scale) in places}, buffer

    def _buffer(self, size: int) -> Tensor:
        # A kernel may read a whole tile of 16 rows at the end of the buffer.
        padding = 16 * (max((inputs for _, inputs in self._shapes.values()), default=0) + 16)
        return torch.zeros(size + padding, dtype=self._dtype, device=self._device)
