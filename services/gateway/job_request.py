"""The body of POST /v1/fine_tuning/jobs, checked, and as options of the coordinator."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from services.gateway.errors import ApiError, bad_value
from services.gateway.wire import parse
from shared.adapter_files import MAX_RANK
from shared.rounds import STRATEGIES, Lora

LEARNING_RATE = 5e-4  # times learning_rate_multiplier
MICRO_BATCH = 4
LOCAL_STEPS = 6  # optimiser steps a client and round, unless metadata says otherwise
DEFAULT_EPOCHS = 3

Auto = Literal["auto"]


class Hyperparameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    n_epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    learning_rate_multiplier: float | Auto = "auto"


class Supervised(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hyperparameters: Hyperparameters | None = None


class Method(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "supervised"
    supervised: Supervised | None = None


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``metadata`` also carries what OpenAI has no field for: see ``OPTIONS``."""

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: int | None = None
    metadata: dict[str, str] | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: list[Any] | None = None


# metadata key -> (type, least, most); "strategy" and "shard" apart.
OPTIONS: dict[str, tuple[type, float, float]] = {
    "rank": (int, 1, MAX_RANK),
    "lora_alpha": (float, 1e-6, 1e6),
    "local_steps": (int, 1, 10_000),
    "max_rounds": (int, 1, 10_000),
    "max_tokens": (int, 8, 1 << 20),
    "learning_rate": (float, 1e-9, 10.0),
}
_decoder = msgspec.json.Decoder(JobRequest)


def job_request(body: bytes) -> JobRequest:
    """Raises ApiError 400 naming the field."""
    asked = parse(_decoder, body)
    if asked.suffix is not None and not 1 <= len(asked.suffix) <= 64:
        raise bad_value("suffix", "suffix has 1 to 64 characters")
    if asked.seed is not None and not 0 <= asked.seed <= 2147483647:
        raise bad_value("seed", "seed must lie between 0 and 2147483647")
    if asked.method is not None and asked.method.type != "supervised":
        raise bad_value("method", f"method {asked.method.type!r}: only supervised is offered")
    if asked.integrations:
        raise bad_value("integrations", "integrations are not offered")
    _check_hyperparameters(hyperparameters(asked))
    if asked.metadata is not None and len(asked.metadata) > 16:
        raise bad_value("metadata", "at most 16 entries")
    return asked


def hyperparameters(asked: JobRequest) -> Hyperparameters:
    """From the method, or where old clients put them."""
    if asked.method is not None and asked.method.supervised is not None:
        found = asked.method.supervised.hyperparameters
        if found is not None:
            return found
    return asked.hyperparameters or Hyperparameters()


def _check_hyperparameters(found: Hyperparameters) -> None:
    if found.n_epochs != "auto" and not 1 <= found.n_epochs <= 50:
        raise bad_value("hyperparameters", "n_epochs must lie between 1 and 50")
    if found.batch_size != "auto" and not 1 <= found.batch_size <= 256:
        raise bad_value("hyperparameters", "batch_size must lie between 1 and 256")
    rate = found.learning_rate_multiplier
    if rate != "auto" and not 0 < rate <= 1000:
        raise bad_value("hyperparameters", "learning_rate_multiplier must lie in (0, 1000]")


def options(asked: JobRequest, samples: int, homes: int) -> dict[str, str | int | float]:
    """What ``AdapterRegistry.set_training`` takes (the coordinator's TrainingOptions).

    Rounds are chosen so that each of ``homes`` replicas sees its share of ``samples``
    ``n_epochs`` times. Raises ApiError 400 for bad metadata.
    """
    found = hyperparameters(asked)
    batch = 32 if found.batch_size == "auto" else found.batch_size
    micro = math.gcd(batch, MICRO_BATCH)
    rate = 1.0 if found.learning_rate_multiplier == "auto" else found.learning_rate_multiplier
    epochs = DEFAULT_EPOCHS if found.n_epochs == "auto" else found.n_epochs
    own = _own(asked.metadata or {})
    steps = int(own.get("local_steps", LOCAL_STEPS))
    share = max(1, samples // homes)
    rounds = max(1, math.ceil(epochs * share / (steps * batch)))
    shape = Lora()
    chosen: dict[str, str | int | float] = {
        "rank": shape.rank,
        "lora_alpha": shape.lora_alpha,
        "B0": micro,
        "accumulation": batch // micro,
        "learning_rate": LEARNING_RATE * rate,
        "local_steps": steps,
        "max_rounds": min(rounds, 10_000),
        "seed": asked.seed or 0,
    }
    return {**chosen, **own}


def _own(metadata: dict[str, str]) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {}
    for name, text in metadata.items():
        if name == "strategy":
            if text not in STRATEGIES:
                raise bad_value("metadata", f"strategy: one of {', '.join(STRATEGIES)} expected")
            found[name] = text
        elif name in OPTIONS:
            kind, least, most = OPTIONS[name]
            try:
                value = kind(text)
            except ValueError:
                raise bad_value("metadata", f"{name}: a number expected") from None
            if not least <= value <= most:
                raise bad_value("metadata", f"{name} must lie between {least:g} and {most:g}")
            found[name] = value
    return found


def shards(asked: JobRequest) -> int:
    """Over how many replicas the owner lets the file be split (metadata ``shard``)."""
    text = (asked.metadata or {}).get("shard", "1")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= 1024:
        raise ApiError(400, "shard: a number from 1 to 1024 expected", param="metadata")
    return int(text)
