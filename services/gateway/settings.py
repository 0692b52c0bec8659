"""Settings of the gateway (section ``gateway`` of collm.yaml, ``COLLM_GATEWAY_*``)."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shared import settings
from shared.adapter_files import check_name
from shared.slo import Slo


class SloSettings(BaseModel):
    """Limits in milliseconds that a request gets when it names none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)
    e2e_ms: float | None = Field(None, gt=0)

    def slo(self) -> Slo:
        return Slo(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms, e2e_ms=self.e2e_ms)


class ModelSettings(BaseModel):
    """One served model. The folder defaults to the one the replicas name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: Path | None = Field(None, description="Folder with tokenizer.json")
    slo: SloSettings = SloSettings()
    default_max_tokens: int | None = Field(
        None, ge=1, description="Of a chat that names none; default: what the context leaves"
    )


class LimitSettings(BaseModel):
    """What one tenant may use, of all gateways together; None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1, description="Prompt and answer")
    concurrency: int | None = Field(None, ge=1, description="Requests running at once")


class TenantSettings(BaseModel):
    """What differs for one tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    limits: LimitSettings = LimitSettings()
    storage_bytes: int | None = Field(None, ge=0, description="Files; default: storage_bytes")
    feedback_adapter: str = Field(
        "", description="Adapter that learns from this tenant's feedback; empty: none is kept"
    )

    @field_validator("feedback_adapter")
    @classmethod
    def _name(cls, value: str) -> str:
        return check_name(value) if value else value


class GatewaySettings(settings.Settings):
    """Everything the gateway can be told."""

    section: ClassVar[str] = "gateway"

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    name: str = Field("", description="Id in stream names; default: made anew at each start")
    models: dict[str, ModelSettings] = Field({}, description="By served name")

    queue_limit: int = Field(10_000, ge=1, description="Waiting requests a model, then 503")
    when_no_replica: Literal["refuse", "wait"] = Field(
        "refuse", description="What a request meets while no replica of its model lives"
    )
    request_timeout: float = Field(600.0, gt=0, description="Hard limit of a request, seconds")
    redis_wait: float = Field(30.0, gt=0, description="How long Redis may be away, seconds")
    max_attempts: int = Field(3, ge=1, description="Times a request is tried when replicas die")
    stale_after: float = Field(
        30.0, gt=0, description="Seconds without progress after which a request is looked for"
    )
    retry_after: float = Field(
        2.0,
        gt=0,
        description="Seconds named with a 503; with a full queue rather what it takes to empty",
    )

    limits: LimitSettings = Field(LimitSettings(), description="Of a tenant not named below")
    tenants: dict[str, TenantSettings] = Field({}, description="By tenant")
    allow_open: bool = Field(
        False, description="Without keys, listen on `host` even if others can reach it"
    )
    storage_bytes: int = Field(1 << 30, ge=0, description="Files of a tenant")
    max_file_bytes: int = Field(256 << 20, ge=1024)
    tracing: bool = Field(
        False, description="OpenTelemetry spans of each request, by OTLP (`OTEL_*` say where)"
    )
    adapter_root: Path | None = Field(
        None, description="Where load_lora_adapter may read; default: <data_dir>/adapters"
    )
    adapter_wait: float = Field(60.0, gt=0, description="Seconds for all replicas to load one")

    max_body_bytes: int = Field(8 << 20, ge=1024)
    max_header_bytes: int = Field(32 << 10, ge=1024)
    body_timeout: float = Field(30.0, gt=0, description="Seconds for a whole request body")
    max_choices: int = Field(128, ge=1, description="n times the number of prompts")
    sse_keep_alive: float = Field(
        15.0, ge=0, description="Seconds of silence before a comment in a stream; 0: none"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Web pages that may call, as https://host; '*': all; none: CORS is off"
    )
    admin_port: int | None = Field(
        None, ge=1, le=65535, description="The admin routes answer here and nowhere else"
    )
    admin_host: str = Field("127.0.0.1", description="Address of admin_port")
    shutdown_grace: float = Field(30.0, gt=0, description="Seconds for running answers at the end")

    def may_listen(self, host: str) -> bool:
        """Not where others reach it while everybody is the operator, unless that is wanted."""
        return self.api_keys_file is not None or self.allow_open or _loopback(host)

    @model_validator(mode="after")
    def _apart(self) -> GatewaySettings:
        wanted = [t.feedback_adapter for t in self.tenants.values() if t.feedback_adapter]
        if twice := next((name for name in wanted if wanted.count(name) > 1), None):
            raise ValueError(f"tenants: two of them have the feedback_adapter {twice!r}")
        return self


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
