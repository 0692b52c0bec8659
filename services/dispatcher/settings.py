"""Settings of the dispatcher (section ``dispatcher`` of collm.yaml, ``COLLM_DISPATCHER_*``)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from shared.settings import Settings


class DispatcherSettings(Settings):
    """Frozen; see ``shared.settings`` for where values come from."""

    section: ClassVar[str] = "dispatcher"

    policy: str = Field(
        "collm", description="Dispatch policy, or module:Class (docs/simulation.md, Policies)"
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the policy (the same page)"
    )
    host: str = Field("127.0.0.1", description="Address of /metrics and /health")
    port: int = Field(9101, ge=0, le=65535, description="Port of /metrics and /health; 0: any")
    queue_max: int = Field(20_000, ge=1, description="Queued requests a model; more are refused")
    decisions_kept: int = Field(
        50_000, ge=0, description="Releases and refusals that `collm why REQUEST` can still find"
    )
    read_count: int = Field(256, ge=1, description="Entries taken with one read")
