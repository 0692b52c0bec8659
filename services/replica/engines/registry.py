"""Builds the engine that the settings name. Torch is imported only for the torch engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.replica.engines.base import Engine
from services.replica.settings import ReplicaSettings
from shared import profile as profiles
from shared.clock import Now


def build(
    settings: ReplicaSettings,
    now: Now,
    beside: dict[str, Callable[[], int]],
    weights: dict[str, Any] | None = None,
) -> dict[str, Engine]:
    """Replica id -> its engine. ``beside[id]()`` is the micro-batch training beside it.

    ``weights``: the handle (as JSON values) of weights that another process holds.

    Raises whatever names a bad model folder, profile or vocabulary (ValueError, OSError).
    """
    if settings.engine == "emulated":
        return _emulated(settings, now, beside)
    return {settings.id: _torch(settings, now, weights)}


def _emulated(
    settings: ReplicaSettings, now: Now, beside: dict[str, Callable[[], int]]
) -> dict[str, Engine]:
    from services.replica.engines.emulated import EmulatedEngine, Options
    from services.replica.engines.emulated_text import model_card

    profile = profiles.load(settings.profile)
    card, words = model_card(settings.model, settings.model_path, profile, created=now())
    engines: dict[str, Engine] = {}
    for number, replica in enumerate(settings.replicas):
        options = Options(
            time_scale=settings.time_scale,
            seed=settings.seed + number,
            batching=settings.batching,
            lora=settings.lora,
            max_step_tokens=settings.max_step_tokens,
        )
        engines[replica] = EmulatedEngine(
            card,
            profile,
            words=words,
            b_max=_given(settings, "b_max", profile.b_max),
            kv_tokens=_given(settings, "kv_tokens", profile.kv_tokens),
            options=options,
            now=now,
            beside=beside[replica],
        )
    return engines


def _given(settings: ReplicaSettings, field: str, otherwise: int) -> int:
    """A limit from the settings if somebody set it, else the profile's."""
    value: int = getattr(settings, field)
    return value if field in settings.model_fields_set else otherwise


def _torch(settings: ReplicaSettings, now: Now, weights: dict[str, Any] | None) -> Engine:
    import msgspec

    from services.replica.engines.torch.engine import TorchEngine
    from services.replica.hand_over import Handle

    folder: Path | None = settings.model_path
    assert folder is not None, "settings check this"
    engine: Engine = TorchEngine.load(
        folder,
        name=settings.model,
        dtype=settings.dtype,
        threads=settings.thread_count,
        kv_tokens=settings.kv_tokens,
        b_max=settings.b_max,
        max_step_tokens=settings.max_step_tokens,
        step_seconds=settings.step_seconds,
        prefix_cache=settings.prefix_cache,
        weights=settings.weights,
        device=settings.device,
        held=None if weights is None else msgspec.convert(weights, Handle),
        clock=now,
    )
    return engine


def shadow(settings: ReplicaSettings, engine: Engine) -> Callable[[], None] | None:
    """What hands versions that training publishes to the engine; None for an emulated one."""
    if settings.engine == "emulated":
        return None
    from services.replica.engines.torch.engine import TorchEngine
    from services.replica.shadow_feed import ShadowFeed

    assert isinstance(engine, TorchEngine)
    return ShadowFeed(settings.shadow_path(settings.id), engine, settings.data_dir)
