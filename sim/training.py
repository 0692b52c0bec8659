"""Training beside serving: how fast micro-steps go, when they wait, what they learn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from shared.latency import LatencyModel

if TYPE_CHECKING:
    from sim.job import Job
    from sim.replica import Replica


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out cross-entropy (nats/token) against samples trained: a power law with a floor.

    CE(s) = floor + (start - floor) * (1 + s / scale)^-power, the form of data scaling laws
    (Kaplan et al. 2020), fitted to runs of this project (``source``).

    ``batch`` is the effective batch, in samples, of those runs: a sample in a larger one brings
    less, by the gradient noise scale p as (p + batch) / (p + larger) (McCandlish et al. 2018).
    """

    source: str
    start: float
    floor: float
    scale: float
    power: float
    batch: float = 4.0
    last: tuple[float, float] | None = None  # last fitted point: samples, cross-entropy

    def worth(self, batch: float, noise_scale: float) -> float:
        """Samples of the fitted runs that one sample in an effective batch so large is worth."""
        return (noise_scale + self.batch) / (noise_scale + batch)

    def cross_entropy(self, samples: float) -> float:
        decay: float = (1.0 + samples / self.scale) ** -self.power
        return self.floor + (self.start - self.floor) * decay


class Trainer:
    """Local training of one replica in the current round. Progress in micro-steps.

    ``beside`` is told before each span how many requests decode; with ``yielding`` the trainer
    waits in spans in which a running request would miss its deadline beside it.
    """

    def __init__(
        self, latency: LatencyModel, B: int, target: float, now: float, *, yielding: bool = True
    ) -> None:
        self.latency, self.B, self.target, self.yielding = latency, B, target, yielding
        self.suspended = False
        self.done = 0.0
        self.active_seconds = 0.0
        self._b, self._waits, self._since = 0, False, now
        self._ended = False

    @property
    def effective(self) -> int:
        """The micro-batch that computes at this moment."""
        return 0 if self._waits or self.suspended or self._ended else self.B

    def accrue(self, now: float) -> None:
        """Count the micro-steps since the last call."""
        B = self.effective
        if B > 0:
            self.done += (now - self._since) / max(self.latency.t_train(self._b, B), 1e-9)
            self.active_seconds += now - self._since
        self._since = now

    def beside(self, decoding: int, now: float, replica: Replica | None = None) -> int:
        """``decoding`` requests run from now on; returns the micro-batch beside them."""
        self.accrue(now)
        self._b = decoding
        self._waits = (
            self.yielding and replica is not None and self._would_miss(replica, decoding, now)
        )
        return self.effective

    def suspend(self, suspended: bool, now: float) -> None:
        """B = 0 was asked for, or no longer."""
        self.accrue(now)
        self.suspended = suspended

    def pause(self, now: float) -> None:
        """The round is done for this client; nothing trains until the next one."""
        self.accrue(now)
        self._ended = True

    def remaining(self) -> float:
        """Seconds to the target when nothing decodes beside it; inf while suspended."""
        if self.suspended or self.B <= 0:
            return math.inf
        return max(0.0, self.target - self.done) * self.latency.t_train(0, self.B)

    def _would_miss(self, replica: Replica, decoding: int, now: float) -> bool:
        """Whether some running request keeps a limit alone that it would miss beside training."""
        beside = self.latency.t_infer(decoding, self.B)
        alone = self.latency.t_infer(decoding, 0)
        for finish_at, _, job in replica.decoding:
            left = finish_at - replica.iteration
            room = _room(job, left, now)
            if left * alone <= room < left * beside:
                return True
        ahead = 0.0  # prompts are computed oldest first
        for job in replica.prefilling:
            ahead += job.to_prefill
            due = job.request.ttft_deadline
            if due is not None and self._between(ahead, due - now):
                return True
        return False

    def _between(self, tokens: float, room: float) -> bool:
        """Whether so many prompt tokens are done within ``room`` seconds only without training."""
        alone = self.latency.t_prefill(tokens, 0)
        return alone <= room < self.latency.t_prefill(tokens, self.B)


def _room(job: Job, left: int, now: float) -> float:
    """Seconds that the ``left`` tokens of a decoding request may take; inf without a limit."""
    request = job.request
    room = math.inf if request.deadline is None else request.deadline - now
    if request.tpot is not None and job.output > 1:
        room = min(room, job.first_token + (job.output - 1) * request.tpot - now)
    return room
