"""Settings of ``collm up`` (section ``up`` of collm.yaml, ``COLLM_UP_*``)."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from collm import models
from shared.settings import Settings

_SIZE = re.compile(r"[0-9]+([kmg]?b)?", re.IGNORECASE)


class UpSettings(Settings):
    """What to run on this machine. Frozen; command-line options win over file and environment."""

    section: ClassVar[str] = "up"

    redis_url: str = Field("", description="An existing Redis; empty: start one of our own")
    redis_port: int = Field(0, ge=0, le=65535, description="Port of our own Redis; 0: any free")
    redis_maxmemory: str = Field(
        "2gb",
        description="Memory of our own Redis, such as 512mb; what exceeds it is refused, nothing "
        "is evicted; 0: no limit",
    )
    host: str = Field("127.0.0.1", description="Address on which the gateway listens")
    port: int = Field(8000, ge=0, le=65535, description="Port of the gateway; 0: any free")
    models: tuple[str, ...] = Field(
        (models.DEFAULT_NAME,), min_length=1, description="NAME or NAME:REPLICAS, one or several"
    )
    served_model_names: tuple[str, ...] = Field((), description="Public names, in models' order")
    replicas: int = Field(3, ge=1, description="Replicas of a model that names no number")
    policy: str | None = Field(None, description="Dispatch policy; none: the dispatcher's own")
    engine: Literal["torch", "emulated"] = Field("torch", description="Engine of the replicas")
    profile: str | None = Field(None, description="Hardware profile of the emulated engine")
    lora_modules: dict[str, str] = Field({}, description="Adapters to load: name -> PEFT folder")
    train: bool = Field(True, description="Start launcher and coordinator: fine-tune when idle")
    ready_timeout: float = Field(
        600.0, gt=0, description="Seconds within which the first request must be answered"
    )
    stop_timeout: float = Field(
        20.0,
        gt=0,
        description="Seconds a process may take to stop; a replica at least its drain_seconds and "
        "ten more",
    )
    restarts: int = Field(
        8, ge=0, description="Quick deaths in a row after which a process is given up"
    )

    @field_validator("redis_maxmemory", mode="before")
    @classmethod
    def _size(cls, value: Any) -> str:
        """As Redis takes it; YAML reads 0 as a number."""
        if not _SIZE.fullmatch(str(value)):
            raise ValueError("a size such as 512mb or 2gb expected, or 0")
        return str(value)
