"""Settings of the coordinator (section ``coordinator``), and how an adapter is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from shared.adapter_files import MAX_RANK
from shared.rounds import ACCUMULATION, STRATEGIES, Lora, Privacy
from shared.settings import Settings

_SHAPE = Lora()


class TrainingOptions(BaseModel):
    """How sessions of one adapter train; defaults from the coordinator's settings, overridden
    by the adapter's own (``AdapterRegistry.set_training``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    strategy: str = Field("fedavg", description=f"one of {', '.join(STRATEGIES)}")
    rank: int = Field(_SHAPE.rank, ge=1, le=MAX_RANK, description="LoRA rank of a new adapter")
    lora_alpha: float = Field(_SHAPE.lora_alpha, gt=0)
    target_modules: tuple[str, ...] = _SHAPE.target_modules
    client_ranks: dict[str, int] = Field(
        default_factory=dict,
        description="flexlora: replicas that train another rank, as replica-1=4,replica-2=16",
    )
    local_steps: int = Field(6, ge=1, description="optimiser steps a client and round")
    accumulation: int = Field(ACCUMULATION, ge=1, description="micro-batches a step")
    B0: int = Field(4, ge=1, description="samples of a micro-batch at the start")
    B_max: int = Field(16, ge=1)
    micro_batch: int = Field(0, ge=0, description="always this micro-batch; 0 = chosen by goodput")
    concurrency: int = Field(0, ge=0, description="always this concurrency; 0 = b*")
    learning_rate: float = Field(
        5e-4,
        gt=0,
        description="of B0 (or of micro_batch); with the root of the batch that is chosen",
    )
    max_rounds: int = Field(20, ge=1, description="rounds a session")
    max_tokens: int = Field(512, ge=8, description="tokens of a sample; longer ones are cut")
    heldout_fraction: float = Field(0.1, ge=0, lt=1)
    heldout_samples: int = Field(16, ge=1, description="held-out samples of a check")
    evaluate_share: float = Field(
        0.03,
        ge=0,
        description="part of a round's training that held-out losses in it may take; 0 = no bound",
    )
    publish: Literal["every_step", "on_improvement", "per_round"] = "on_improvement"
    prox_mu: float = Field(0.01, ge=0, description="fedprox: weight of the proximal term")
    server_lr: float = Field(1e-3, gt=0, description="fedadam: server's learning rate")
    trim: float = Field(0.2, ge=0, lt=0.5, description="trimmed_mean: share cut from each side")
    clip: float = Field(0.0, ge=0, description="privacy: L2 bound of an update; 0 = off")
    noise_multiplier: float = Field(0.0, ge=0, description="privacy: noise over the bound")
    privacy_delta: float = Field(1e-5, gt=0, lt=1)
    margin: float = Field(
        0.02, ge=0, description="relative rise of held-out loss that is still promoted"
    )
    seed: int = Field(0, ge=0)

    @field_validator("client_ranks", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair)

    @model_validator(mode="after")
    def _fits(self) -> TrainingOptions:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r}: one of {', '.join(STRATEGIES)} expected")
        if self.client_ranks and self.strategy != "flexlora":
            raise ValueError(
                f"client_ranks: {self.strategy} averages equal ranks only; flexlora joins"
            )
        if any(not 1 <= rank <= MAX_RANK for rank in self.client_ranks.values()):
            raise ValueError(f"client_ranks: ranks from 1 to {MAX_RANK} expected")
        if self.noise_multiplier > 0 and self.clip == 0:
            raise ValueError("noise_multiplier without clip: noise needs a bound to be scaled to")
        return self

    @property
    def lora(self) -> Lora:
        return Lora(rank=self.rank, lora_alpha=self.lora_alpha, target_modules=self.target_modules)

    @property
    def privacy(self) -> Privacy | None:
        if self.clip == 0:
            return None
        return Privacy(
            clip=self.clip, noise_multiplier=self.noise_multiplier, delta=self.privacy_delta
        )

    @property
    def server_options(self) -> dict[str, float]:
        return {"server_lr": self.server_lr, "trim": self.trim}


class BadOptions(ValueError):
    """An adapter's training options are unusable; names the field."""


class CoordinatorSettings(Settings):
    """Frozen; see ``shared.settings`` for where values come from."""

    section: ClassVar[str] = "coordinator"

    host: str = Field("127.0.0.1", description="Address of /metrics and /health")
    port: int = Field(9103, ge=0, le=65535, description="Port of /metrics and /health; 0: any")
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    exchange: Literal["auto", "redis", "group"] = Field(
        "auto", description="path of updates; auto: a process group from exchange_bytes on"
    )
    exchange_bytes: int = Field(32 << 20, ge=1)
    exchange_timeout: float = Field(20.0, gt=0, description="seconds for a process group")
    round_seconds: float = Field(
        600.0, gt=0, description="a round's deadline while nothing is known of its length"
    )
    round_slack: float = Field(3.0, gt=1, description="deadline over the expected length")
    round_least: float = Field(30.0, gt=0, description="shortest deadline in seconds")
    grace: float = Field(10.0, gt=0, description="seconds past the deadline for handing over")
    job_seconds: float = Field(300.0, gt=0, description="limit of every other job")
    refit_seconds: float = Field(2.0, gt=0, description="between publications of coefficients")
    headroom: float = Field(0.2, ge=0, description="capacity kept beyond the load (h)")
    slo_seconds: float | None = Field(
        None, gt=0, description="SLO while the dispatcher names none (tau)"
    )
    keep_versions: int = Field(20, ge=2, description="versions of an adapter that are kept")

    def options(self, own: Mapping[str, str | int | float]) -> TrainingOptions:
        """Defaults with an adapter's own. Raises BadOptions."""
        try:
            return TrainingOptions.model_validate({**self.training.model_dump(), **own})
        except ValidationError as e:
            error = e.errors()[0]
            where = ".".join(str(part) for part in error["loc"]) or "options"
            raise BadOptions(f"training options: {where}: {error['msg']}") from e
