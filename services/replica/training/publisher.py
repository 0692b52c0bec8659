"""Publishing a locally trained version: on disk in PEFT's format, then into the shadow.

Files first: a version that serves must be found on disk, because a half-streamed answer may have
to be continued on it by another replica.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from services.replica.shadow import Card, ShadowWriter
from services.replica.training.model import Adapter, LoraSpec
from shared import adapter_files

_LOCAL = re.compile(r"r\d+\.s\d+(?:-[0-9a-f]+)?\.(.+)")


def version_id(round_number: int, step: int, replica: str, again: str = "") -> str:
    """The identity (round, local step, replica) as a folder name: ``r3.s12.replica-0``.

    ``again`` tells one apart whose name is taken: ``r3.s12-1f0a.replica-0``.
    """
    return f"r{round_number}.s{step}{again and f'-{again}'}.{replica}"


def write_folder(
    data_dir: Path,
    name: str,
    version: str,
    spec: LoraSpec,
    tensors: Mapping[str, Tensor],
    base: str,
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a version as a PEFT folder, whole or not at all; returns the folder.

    ``base`` is what PEFT is to load the adapter on: the base model's folder; ``extra`` are
    further files to lie beside the tensors (name -> content).
    """
    with adapter_files.staged(data_dir, name, version) as folder:
        config = spec.peft_config(base)
        config.inference_mode = True
        config.save_pretrained(folder)
        plain = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        save_file(plain, folder / adapter_files.TENSOR_FILE, metadata={"format": "pt"})
        for file, content in (extra or {}).items():
            (folder / file).write_bytes(content)
    return adapter_files.folder(data_dir, name, version)


class Publisher:
    """Publishes versions of one adapter from one replica."""

    def __init__(
        self, *, data_dir: Path, replica: str, name: str, base: str, shadow: ShadowWriter, keep: int
    ) -> None:
        self._data_dir, self._replica, self._name = data_dir, replica, name
        self._base, self._shadow, self._keep = base, shadow, keep
        self.published: list[str] = []

    def publish(self, adapter: Adapter, round_number: int, step: int) -> tuple[str, Path]:
        """Write, flip the shadow, drop own versions beyond the retention."""
        version = version_id(round_number, step, self._replica)
        if adapter_files.folder(self._data_dir, self._name, version).exists():
            # Another session's round of this number, or this one's before a crash: a version
            # never changes, so this is a new one.
            version = version_id(round_number, step, self._replica, secrets.token_hex(2))
        path = write_folder(
            self._data_dir, self._name, version, adapter.spec, adapter.tensors(), self._base
        )
        self.show(adapter, version)
        self.published.append(version)
        self._prune()
        return version, path

    def show(self, adapter: Adapter, version: str) -> None:
        """Hand the adapter as it is to the serving side under ``version``."""
        card = Card(
            name=self._name,
            version=version,
            rank=adapter.spec.r,
            lora_alpha=adapter.spec.lora_alpha,
            tensors=adapter.bounds(),
        )
        flat: NDArray[np.float32] = adapter.flat.detach().cpu().numpy()
        self._shadow.publish(card, flat)

    def _prune(self) -> None:
        """Keep the ``keep`` versions this replica wrote last; versions of others are not ours.

        By time and not by number: another session counts its rounds and steps anew.
        """
        folder = self._data_dir / "adapters" / self._name
        own = []
        for place in folder.iterdir():
            found = _LOCAL.fullmatch(place.name)
            if found and found[1] == self._replica:
                own.append((place.stat().st_mtime_ns, place.name))
        for _, version in sorted(own)[: -self._keep]:
            adapter_files.remove(self._data_dir, self._name, version)
