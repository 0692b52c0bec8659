"""Settings of a replica's training process (section ``training``)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.settings import Settings


class TrainingSettings(Settings):
    """How a replica trains. What it trains, and how long, is in each job."""

    section: ClassVar[str] = "training"

    lora_dropout: float = Field(0.0, ge=0, lt=1)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0, description="limit of the gradient's L2 norm")
    gradient_checkpointing: bool = False

    heldout_limit: int = Field(16, ge=1, description="chats that one evaluation reads at most")
    micro_batch: int = Field(4, ge=1, description="chats that an evaluation computes at once")
    skip_broken: bool = Field(False, description="leave broken lines out instead of failing")

    evaluate_every: int = Field(5, ge=1, description="optimiser steps between held-out losses")
    save_every: int = Field(25, ge=1, description="optimiser steps between saved states")
    keep_versions: int = Field(20, ge=1, description="versions of an adapter kept on disk")

    threads: int = Field(0, ge=0, description="compute threads; 0 = what the host's slots give")
    yielding: bool = Field(True, description="wait while serving has no slack")
    worker_ttl: float = Field(6.0, ge=3, description="seconds after which a silent worker is dead")
