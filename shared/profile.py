"""Hardware profiles: small YAML files that say how fast a replica is, with their source.

The emulated engine and the simulator read the same files, from ``config/profiles`` or a path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from shared.latency import LatencyModel

Count = Annotated[int, msgspec.Meta(ge=1)]
From0 = Annotated[float, msgspec.Meta(ge=0)]
Above0 = Annotated[float, msgspec.Meta(gt=0)]
PROFILES = Path(__file__).resolve().parent.parent / "config" / "profiles"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of replica. Seconds, tokens."""

    name: str
    source: str  # where the numbers come from: a bench (when, on what) or a publication
    coefficients: LatencyModel
    b_max: Count = 64
    kv_tokens: Count = 1 << 20
    context: Count = 8192
    vocabulary: Count = 49152
    jitter: From0 = 0.0  # coefficient of variation of a step's time (log-normal)
    load_seconds: From0 = 0.0  # load of the base model
    adapter_seconds: From0 = 0.0  # fetch of an adapter that is not resident
    adapter_slots: Count = 64
    merge_seconds: From0 = 0.0  # switch of a merged adapter (dLoRA baseline)
    merged_speedup: Above0 = 1.0  # decode iteration unmerged / merged
    output_mean: Above0 = 128.0  # length of an emulated answer that may end by itself
    numbers: dict[str, str] = {}  # source of each figure, free text


class ProfileError(ValueError):
    """The profile does not exist or a field is bad; the message names file and field."""


def load(name: str) -> Profile:
    """Read a profile by name (``config/profiles/<name>.yaml``) or path. Raises ProfileError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise ProfileError(f"no profile {name!r} ({path}); known: {known}") from e
    except OSError as e:
        raise ProfileError(f"{path}: cannot be read: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as e:  # ValueError: an odd date
        raise ProfileError(f"{path}: not YAML: {e}") from e
    try:
        found = msgspec.convert(content, Profile)
    except msgspec.ValidationError as e:
        raise ProfileError(f"{path}: {e}") from e
    _check(path, content["coefficients"])
    return found


def _check(path: Path, coefficients: Mapping[str, Any]) -> None:
    """What the model, which messages carry too, lets pass: in a file a strange name is a slip."""
    for name, value in coefficients.items():
        if name not in LatencyModel.__struct_fields__:
            known = ", ".join(LatencyModel.__struct_fields__)
            raise ProfileError(f"{path}: no coefficient {name!r}; known: {known}")
        if not 0 <= value < math.inf:
            raise ProfileError(
                f"{path}: coefficients.{name}: a finite number, at least 0, expected, not {value}"
            )
