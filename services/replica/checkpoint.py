"""A model's checkpoint as it was fetched: its files, its config.json, the shapes of its tensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


class WeightsError(ValueError):
    """A checkpoint cannot be used: names the file and says what to do."""


def sources(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, in order. Raises WeightsError: none there."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as e:
            raise WeightsError(f"{index}: no valid index ({e})") from e
        files = [folder / name for name in names]
    else:
        files = [single]
    for file in files:
        if not file.is_file():
            raise WeightsError(
                f"{file}: no such file; a model folder needs config.json, tokenizer.json and "
                "its weights as safetensors (pickled weights are refused)"
            )
    return files


def fingerprint(folder: Path, layout: str) -> str:
    """Changes with ``layout`` and when a file of the checkpoint does (name, size, last write)."""
    parts = [layout]
    for file in [*sources(folder), folder / "config.json"]:
        if not file.is_file():
            raise WeightsError(f"{file}: no such file")
        status = file.stat()
        parts.append(f"{file.name}:{status.st_size}:{status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. Raises WeightsError when it is no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise WeightsError(f"{path}: cannot be read ({e.strerror})") from e
    except ValueError as e:  # UnicodeDecodeError and JSONDecodeError are both one
        raise WeightsError(f"{path}: no JSON ({e}); fetch the model again") from e
    if not isinstance(config, dict):
        raise WeightsError(f"{path}: a JSON object expected")
    return config


def shapes(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Name -> (file, shape) of every tensor that is stored; a tied output layer is left out."""
    tied = bool(read_config(folder).get("tie_word_embeddings"))
    found = {}
    for file in sources(folder):
        try:
            with safe_open(file, "pt") as reader:
                for name in reader.keys():  # noqa: SIM118
                    found[name] = (file, tuple(reader.get_slice(name).get_shape()))
        except SafetensorError as e:
            raise WeightsError(f"{file}: damaged safetensors file ({e}); fetch it again") from e
    if tied and "model.embed_tokens.weight" in found:
        found.pop("lm_head.weight", None)
    return found
