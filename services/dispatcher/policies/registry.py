"""Which policies there are, by name; one from elsewhere is named ``module:Class``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.dispatcher.policies.base import Policy
from services.dispatcher.policies.collm import Collm
from services.dispatcher.policies.dlora import Dlora
from services.dispatcher.policies.least_loaded import LeastLoaded
from services.dispatcher.policies.peft import Peft
from services.dispatcher.policies.round_robin import RoundRobin
from services.dispatcher.policies.shepherd import Shepherd
from services.dispatcher.policies.split import Split

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "collm": Collm,
    "dlora": Dlora,
    "least_loaded": LeastLoaded,
    "peft": Peft,
    "round_robin": RoundRobin,
    "shepherd": Shepherd,
    "split": Split,
}


# What may be asked for, in words.
CHOICES = f"{', '.join(sorted(POLICIES))}, or module:Class"


class UnknownPolicy(ValueError):
    """No policy has this name, or it does not take one of the options."""


def create(name: str, **options: Any) -> Policy:
    """A fresh policy for one model. ``package.module:Class`` is imported. Raises UnknownPolicy."""
    maker = _foreign(name) if ":" in name else POLICIES.get(name)
    if maker is None:
        raise UnknownPolicy(f"no dispatch policy {name!r}; known: {CHOICES}")
    try:
        made = maker(**options)
    except TypeError as e:
        raise UnknownPolicy(f"dispatch policy {name!r}: {e}{_options(maker)}") from e
    lacking = [m for m in _methods() if not callable(getattr(made, m, None))]
    if lacking or not isinstance(made, Policy):
        missing = ", ".join(lacking) or "name"
        raise UnknownPolicy(f"dispatch policy {name!r} lacks, of base.Policy: {missing}")
    return made


def _options(maker: Callable[..., Policy]) -> str:
    """What it can be told, for the message about what it cannot."""
    try:
        names = inspect.signature(maker).parameters
    except (TypeError, ValueError):  # no Python class
        return ""
    return f"; its options: {', '.join(names) or 'none'}"


def _methods() -> list[str]:
    return [name for name, value in vars(Policy).items() if callable(value) and name[0] != "_"]


def _foreign(name: str) -> Callable[..., Policy]:
    """Found like a module of ``python -m``: in the working folder, too."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last: a file there must not stand for a library
    try:
        found: Callable[..., Policy] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise UnknownPolicy(f"dispatch policy {name!r}: {e}") from e
    return found
