"""Settings of a replica process: section ``replica`` of collm.yaml, ``COLLM_REPLICA_*``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from shared.settings import Settings

STEP_SECONDS = 0.1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ReplicaSettings(Settings):
    """One replica process: one real replica, or any number of emulated ones."""

    section: ClassVar[str] = "replica"

    id: str = Field("replica-0", description="Unique in the cluster; also names its streams")
    ids: tuple[str, ...] = Field(
        (), description="Emulated engine only: several replicas in this process, instead of id"
    )
    model: str = Field("default", min_length=1, description="Served name of the base model")
    model_path: Path | None = Field(
        None, description="Folder of the model; the emulated engine needs only its tokenizer"
    )
    engine: str = Field("torch", pattern="^(torch|emulated)$")
    profile: str = Field("zero", description="Hardware profile of the emulated engine")
    host: str = Field("127.0.0.1", description="Address that /metrics and /health listen on")
    port: int = Field(0, ge=0, le=65535, description="Port of /metrics and /health; 0 = any")

    # Engine limits. Tokens, requests.
    b: int | None = Field(None, ge=1, description="Concurrency limit at the start; none = b_max")
    b_max: int = Field(64, ge=1, le=65536, description="Highest concurrency")
    kv_tokens: int = Field(32768, ge=256, description="KV memory, in tokens of all requests")
    max_step_tokens: int = Field(512, ge=16, description="Most prompt tokens in one step")
    step_seconds: float = Field(
        STEP_SECONDS,
        gt=0,
        description="Length of a step with prompts beside running answers, at most (or four times "
        "that of one without, if longer)",
    )
    threads: int = Field(0, ge=0, description="Compute threads; 0 = as many as the host has slots")
    dtype: str = Field("auto", pattern="^(auto|float32|bfloat16)$")
    weights: str = Field("shared", pattern="^(shared|packed)$")
    hold_weights: bool = Field(
        False,
        description="A process holds the weights in memory and hands them to the others, instead "
        "of each mapping the file; always so on a GPU",
    )
    prefix_cache: bool = True
    device: str = Field("auto", description="cpu, cuda, cuda:N; auto = a GPU if there is one")

    # Emulated engine.
    time_scale: float = Field(
        1.0, gt=0, description="Emulated seconds that pass in one real second"
    )
    seed: int = 0
    batching: str = Field(
        "continuous",
        pattern="^(continuous|static)$",
        description="static: a batch runs to its end before the next starts (baseline)",
    )
    lora: str = Field(
        "unmerged",
        pattern="^(unmerged|merged|dynamic)$",
        description="merged: one adapter at a time, with the profile's switch time; dynamic: as "
        "dLoRA's rule decides in each step, who pauses keeps its KV memory (baselines)",
    )

    metrics_kept: int = Field(
        100_000, ge=100, description="Entries of the metrics log, of all replicas together"
    )

    # Training child.
    training: bool = Field(False, description="Run a training process beside inference")
    training_nice: int = Field(19, ge=0, le=19)
    training_gpu_percent: int = Field(
        40, ge=1, le=100, description="GPU threads for training, where an MPS daemon runs"
    )

    # Host.
    slots: int = Field(0, ge=0, description="Compute slots of this host; 0 = its cores")
    slots_dir: Path | None = Field(
        None,
        description="Folder of the slots, common to all replicas of a host; "
        "none = <data_dir>/run/slots",
    )

    # Time limits, seconds.
    drain_seconds: float = Field(30.0, ge=0, description="Longest orderly drain at SIGTERM")
    step_timeout: float = Field(60.0, gt=0, description="A step longer than this is a hang")
    load_timeout: float = Field(600.0, gt=0, description="Longest load of the model")
    restarts: int = Field(
        8, ge=0, description="Child deaths within ten minutes before the replica gives up"
    )

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        if not _ID.fullmatch(value):
            raise ValueError("1 to 64 letters, digits, '.', '_', '-' expected")
        return value

    @field_validator("ids")
    @classmethod
    def _check_ids(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            cls._check_id(one)
        if len(set(value)) != len(value):
            raise ValueError("an id occurs twice")
        return value

    @model_validator(mode="after")
    def _check(self) -> ReplicaSettings:
        if self.engine == "torch" and self.model_path is None:
            raise ValueError("engine torch needs model_path, the folder of the model")
        if self.engine == "torch" and self.ids:
            raise ValueError("ids: only the emulated engine runs several replicas in a process")
        if self.b is not None and self.b > self.b_max:
            raise ValueError(f"b ({self.b}) is above b_max ({self.b_max})")
        if self.lora == "dynamic" and self.batching == "static":
            raise ValueError(
                "lora dynamic chooses each step's batch anew: batching static has none"
            )
        return self

    @property
    def replicas(self) -> tuple[str, ...]:
        """Ids of the replicas in this process."""
        return self.ids or (self.id,)

    @property
    def slot_count(self) -> int:
        """Threads that may compute at once on this host."""
        return self.slots or len(os.sched_getaffinity(0))

    @property
    def thread_count(self) -> int:
        return min(self.threads or self.slot_count, self.slot_count)

    @property
    def slot_folder(self) -> Path:
        return self.slots_dir or self.data_dir / "run" / "slots"

    def folder(self, replica: str) -> Path:
        """Where a replica keeps its data, state and control block."""
        return self.data_dir / "replicas" / replica

    def control_path(self, replica: str) -> Path:
        return self.folder(replica) / "control.bin"

    def shadow_path(self, replica: str) -> Path:
        """Shared memory through which training publishes adapter versions."""
        return self.folder(replica) / "shadow.bin"
