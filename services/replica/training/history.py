"""What a round has done so far, and how it reports it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from services.replica.training.trainer import StepResult


@dataclass
class History:
    """Sums over the steps of a round; saved with the state, so a resumed round reports all."""

    steps: int = 0
    examples: int = 0
    tokens: int = 0
    micro_steps: int = 0
    loss_sum: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    heldout_before: float | None = None
    best: float | None = None
    train_seconds: float = 0.0
    wait_seconds: float = 0.0

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.examples += result.samples
        self.tokens += result.tokens
        self.micro_steps += len(result.micro_seconds)
        self.train_seconds += sum(result.micro_seconds)
        self.wait_seconds += result.wait_seconds
        if math.isfinite(result.loss):
            self.loss_sum += result.loss
            self.last_loss = result.loss
            if self.first_loss is None:
                self.first_loss = result.loss

    def plain(self) -> dict[str, float | int | None]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, plain: dict[str, float | int | None]) -> History:
        return cls(**plain)  # type: ignore[arg-type]

    @property
    def loss(self) -> float | None:
        """Mean over the steps, nats per token."""
        return self.loss_sum / self.steps if self.steps else None

    @property
    def loss_reduction(self) -> float | None:
        """Mean fall of the loss from one step to the next."""
        if self.first_loss is None or self.last_loss is None or self.steps < 2:
            return None
        return (self.first_loss - self.last_loss) / (self.steps - 1)
