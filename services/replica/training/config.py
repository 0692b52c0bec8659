"""What the supervisor hands to the training process: one JSON object."""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.replica.hand_over import Handle
from services.replica.training.settings import TrainingSettings


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the process must know. Paths are absolute; ``main`` raises on a bad one."""

    replica: str
    model: str  # served name of the base model
    folder: str  # checkpoint folder
    redis_url: str
    data_dir: str
    control: str  # path of the control block
    slots: str  # folder of the host's compute slots
    slot_count: int
    shadow: str  # path of the shadow adapter's shared memory
    cache: str = ""  # folder of the fused weights; "" = the checkpoint folder
    dtype: str = "auto"
    weights: Handle | None = None  # weights that another process holds; None = map the file
    environment: dict[str, str] = {}  # set before anything is imported
    previous_exit: int | None = None  # exit code of the process that this one replaces
    settings: dict[str, object] = {}  # TrainingSettings; absent = the environment's
    metrics_kept: int = 100_000  # entries of the metrics log
    log_level: str = "INFO"
    log_format: str = "text"

    def training(self) -> TrainingSettings:
        values = {"redis_url": self.redis_url, "data_dir": self.data_dir, **self.settings}
        return TrainingSettings.model_validate(values)

    @property
    def home(self) -> Path:
        """The replica's own folder: training data, state."""
        return Path(self.data_dir) / "replicas" / self.replica
