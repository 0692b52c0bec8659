"""Settings of the launcher (section ``launcher`` of collm.yaml, ``COLLM_LAUNCHER_*``)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from services.launcher.idle import Floors
from services.launcher.terms import Options
from shared.settings import Settings


class LauncherSettings(Settings):
    """Symbols of the paper in brackets; lengths in ticks."""

    section: ClassVar[str] = "launcher"

    host: str = Field("127.0.0.1", description="Address of /metrics and /health")
    port: int = Field(9102, ge=0, le=65535, description="Port of /metrics and /health; 0: any")
    tick: float = Field(1.0, gt=0, description="seconds between decisions (Delta)")
    window: int = Field(30, ge=1, description="ticks of the load window (T0)")
    window_min: int = Field(10, ge=1, description="(T_min)")
    window_max: int = Field(120, ge=1, description="(T_max)")
    patience_idle: int = Field(
        30, ge=1, description="ticks before an unselected Idle replica serves again (T'0)"
    )
    decay: float = Field(0.1, gt=0, description="EWMA decay a tick (lambda)")
    quantile: float = Field(0.3, ge=0, le=1, description="of the idle thresholds (alpha_q)")
    utilisation_floor: float = Field(0.25, ge=0, le=1, description="(U^L)")
    queue_floor: float = Field(1.0, ge=0, description="requests (q^L)")
    b_floor: float = Field(1.0, ge=0, description="requests decoding together (b^L)")
    headroom: float = Field(0.2, ge=0, description="capacity kept beyond the load (h)")
    idle_rule: Literal["paper", "guarded"] = "guarded"
    min_participants: int = Field(3, ge=1, description="clients that start a session")
    max_wait: float = Field(300.0, ge=0, description="seconds until fewer clients do")
    least_fall: float = Field(0.005, ge=0, description="relative fall of local loss (delta)")
    patience: int = Field(2, ge=1, description="rounds without it before a client leaves")
    fresh_min: int = Field(
        16, ge=1, description="new samples that start another session of an adapter"
    )
    B0: int = Field(4, ge=1, description="micro-batch that a new session starts with")
    dedicated: tuple[str, ...] = Field(
        (),
        description="Replicas that only train: Idle whenever they do not; while any is named, no "
        "other one goes Idle. `collm up --policy split` names them",
    )

    @model_validator(mode="after")
    def _ordered(self) -> LauncherSettings:
        if self.window_min > self.window_max:
            raise ValueError("window_min exceeds window_max")
        return self

    def options(self) -> Options:
        return Options(
            tick=self.tick,
            t0=self.window,
            t_min=min(self.window_min, self.window),
            t_max=max(self.window_max, self.window),
            t_back0=self.patience_idle,
            decay=self.decay,
            floors=Floors(
                utilisation=self.utilisation_floor,
                queued=self.queue_floor,
                b=self.b_floor,
                share=self.quantile,
            ),
            headroom=self.headroom,
            rule=self.idle_rule,
            min_participants=self.min_participants,
            max_wait=self.max_wait,
            least_fall=self.least_fall,
            patience=self.patience,
            dedicated=frozenset(self.dedicated),
        )
