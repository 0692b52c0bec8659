"""From the shadow adapter in shared memory into the engine, between two steps."""

from __future__ import annotations

from pathlib import Path

from services.replica.adapters import AdapterSpec
from services.replica.engines.torch.engine import TorchEngine
from services.replica.shadow import ShadowReader
from shared.adapter_files import folder


class ShadowFeed:
    """Called at every turn of the serving loop; costs well under a microsecond without news."""

    def __init__(self, path: Path, engine: TorchEngine, data_dir: Path) -> None:
        self._engine, self._data_dir = engine, data_dir
        self._reader = ShadowReader(path)
        # What an earlier life was given is on disk; current versions have been loaded from there.
        self._reader.skip()

    def __call__(self) -> None:
        """Serve the newest published version to new requests. Raises AdapterError."""
        for published in self._reader.poll():
            spec = AdapterSpec(r=published.card.rank, lora_alpha=published.card.lora_alpha)
            self._engine.load_adapter_flat(
                published.name,
                published.version,
                published.flat,
                published.card.tensors,
                spec,
                str(folder(self._data_dir, published.name, published.version)),
            )
