"""Adapter versions on disk: ``<data_dir>/adapters/<name>/<version>/`` in PEFT's format.

No torch. Names are checked before they become paths, a version's folder appears whole or not at
all (written beside, then renamed), and paths from outside are confined to a root.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
from safetensors import SafetensorError, safe_open

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
MAX_RANK = 256  # that is served


class BadName(ValueError):
    """A name of an adapter or version that could not safely become a key and a path."""


class BadPath(ValueError):
    """A path leaves the folder that it must lie in."""


class BadFolder(ValueError):
    """A folder is no adapter in PEFT's format; the message names the file and the field."""


class PeftCard(msgspec.Struct, frozen=True, kw_only=True):
    """What ``adapter_config.json`` says about a LoRA adapter."""

    base: str
    rank: int
    lora_alpha: float
    target_modules: tuple[str, ...]


def check_name(name: str) -> str:
    """``name`` itself. Raises BadName: 1 to 128 letters, digits, ``. _ : -``, no path tricks, and
    no end that another key in Redis has."""
    if not NAME.fullmatch(name) or ".." in name or name.split(":")[-1] in ("versions", "job"):
        raise BadName(
            f"adapter or version name {name[:140]!r}: 1 to 128 letters, digits, '.', '_', ':' or "
            "'-', starting with a letter or digit, without '..' and not ending in ':versions' "
            "or ':job'"
        )
    return name


def folder(data_dir: Path, name: str, version: str) -> Path:
    """Where a version lies. Raises BadName."""
    return data_dir / "adapters" / check_name(name) / check_name(version)


def confined(root: Path, path: str | Path) -> Path:
    """``path`` (absolute or below ``root``) with links resolved. Raises BadPath outside root."""
    base = root.resolve()
    found = (base / path).resolve()
    if found != base and base not in found.parents:
        raise BadPath(f"path {str(path)!r} lies outside {base}")
    return found


@contextlib.contextmanager
def staged(data_dir: Path, name: str, version: str) -> Iterator[Path]:
    """A folder to write a version into; it takes its place, whole, when the block ends.

    A version that is there already is left as it was (versions never change) and what was
    written is dropped; an exception in the block leaves nothing behind.
    """
    place = folder(data_dir, name, version)
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.parent / f".{version}.{secrets.token_hex(4)}"
    beside.mkdir()
    try:
        yield beside
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            if not place.exists():
                beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_card(path: Path) -> PeftCard:
    """The card of an adapter folder. Raises BadFolder with the file and field at fault."""
    config = path / CONFIG_FILE
    try:
        raw: Any = orjson.loads(config.read_bytes())
    except OSError as e:
        raise BadFolder(f"{config}: {e.strerror or e}") from e
    except orjson.JSONDecodeError as e:
        raise BadFolder(f"{config}: not JSON: {e}") from e
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise BadFolder(f"{config}: peft_type LORA expected")
    rank, alpha, modules = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise BadFolder(
            f"{config}: r: a whole number from 1 to {MAX_RANK} expected, {rank!r} found"
        )
    if not isinstance(alpha, int | float) or not alpha > 0:
        raise BadFolder(f"{config}: lora_alpha: a positive number expected, {alpha!r} found")
    if isinstance(modules, str):
        modules = [modules]
    if not isinstance(modules, list) or not all(isinstance(m, str) for m in modules):
        raise BadFolder(f"{config}: target_modules: a list of module names expected")
    if not (path / TENSOR_FILE).is_file():
        raise BadFolder(f"{path / TENSOR_FILE}: no such file")
    return PeftCard(
        base=str(raw.get("base_model_name_or_path") or ""),
        rank=rank,
        lora_alpha=float(alpha),
        target_modules=tuple(modules),
    )


def check_tensors(path: Path) -> None:
    """Whether the tensor file's header fits the file. Nothing is read but the header.

    Raises BadFolder.
    """
    file = path / TENSOR_FILE
    try:
        with safe_open(file, framework="np") as tensors:
            if not list(tensors.keys()):
                raise BadFolder(f"{file}: it holds no tensors")
    except OSError as e:
        raise BadFolder(f"{file}: {e.strerror or e}") from e
    except SafetensorError as e:
        raise BadFolder(f"{file}: not a safetensors file: {e}") from e


def remove(data_dir: Path, name: str, version: str | None = None) -> None:
    """Delete one version's folder, or all of an adapter; nothing happens if it is not there."""
    place = data_dir / "adapters" / check_name(name)
    if version is not None:
        place = folder(data_dir, name, version)
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
