"""A training state on disk: optimiser moments, random state, place in the data. Not pickled.

One safetensors file an adapter; numbers and identity are JSON in its metadata. Written beside
and renamed, so that a kill leaves the old state or the new one.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.replica.training.model import LoraSpec


class StateCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the state belongs to. ``finished``: the round was trained to its end."""

    session: str
    round: int
    parent: str
    data: str  # fingerprint of the training data
    lora: LoraSpec
    numbers: dict[str, float | int | None]
    finished: bool
    history: dict[str, float | int | None] = {}  # sums of the round so far


class StateError(ValueError):
    """A state file is damaged; the message names it."""


def save(path: Path, card: StateCard, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        temporary,
        metadata={"card": msgspec.json.encode(card).decode()},
    )
    os.replace(temporary, path)


def load(path: Path) -> tuple[StateCard, dict[str, Tensor]] | None:
    """The state at ``path``; None if there is none. Raises StateError."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as reader:
            card = msgspec.json.decode(reader.metadata()["card"], type=StateCard)
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, msgspec.MsgspecError) as e:
        raise StateError(f"{path}: damaged training state ({e}); delete it to start anew") from e
    return card, tensors
