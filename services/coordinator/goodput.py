"""Training goodput: samples per second times what a sample brings at that batch size.

Source: CoLLM (arXiv 2604.16400) after Pollux (OSDI'21); the noise scale is that of McCandlish
2018. Gradients accumulate over micro-batches: efficiency counts effective batches, latency
models micro-batches.
"""

from __future__ import annotations

import math

import msgspec

from shared.latency import LatencyModel
from shared.rounds import ACCUMULATION, GradientNoise

LEAST_LOSS_REDUCTION = 1e-4
MOST_NOISE = 1e4  # in samples; beyond it the gradient was not told apart from its noise
NOISE_MEMORY = 48  # optimiser steps, over all clients, after which older ones fade


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a client's learning."""

    loss_reduction: float = LEAST_LOSS_REDUCTION  # mean fall an optimiser step, smoothed
    noise_scale: float = 16.0  # in samples; its adapter's
    rounds: int = 0

    def updated(self, loss_reduction: float | None, keep: float = 0.5) -> Progress:
        """With a further round; a value that is missing or not finite changes nothing."""
        keep = keep if self.rounds else 0.0
        return msgspec.structs.replace(
            self,
            loss_reduction=_loss(self.loss_reduction, loss_reduction, keep),
            rounds=self.rounds + 1,
        )


def pooled(old: GradientNoise | None, new: GradientNoise | None) -> GradientNoise | None:
    """Mean over the steps of several clients and rounds of one adapter.

    A client's round has too few micro-gradients to tell the gradient from its noise; all clients
    together, over a few rounds, have enough. A missing or not finite one changes nothing.
    """
    if new is None or not (math.isfinite(new.gradient) and math.isfinite(new.trace)):
        return old
    if old is None:
        return new
    before = min(old.count, NOISE_MEMORY)
    count = before + new.count
    share = new.count / count
    return GradientNoise(
        gradient=old.gradient + share * (new.gradient - old.gradient),
        trace=old.trace + share * (new.trace - old.trace),
        count=count,
    )


def noise_scale(noise: GradientNoise | None) -> float | None:
    """In samples; None while the gradient is not told apart from its noise."""
    if noise is None or noise.trace <= 0 or noise.gradient * MOST_NOISE < noise.trace:
        return None
    return noise.trace / noise.gradient


def _loss(old: float, new: float | None, keep: float) -> float:
    if new is None or not math.isfinite(new):
        return old
    return keep * old + (1 - keep) * max(new, LEAST_LOSS_REDUCTION)


def efficiency(B: int, B0: int, progress: Progress, accumulation: int = ACCUMULATION) -> float:
    """l (p + m B0) / (p + m B): progress a sample, relative to the start's batch size."""
    loss, noise = max(progress.loss_reduction, LEAST_LOSS_REDUCTION), progress.noise_scale
    return loss * (noise + accumulation * B0) / (noise + accumulation * B)


def goodput(
    B: int,
    b: float,
    model: LatencyModel,
    progress: Progress,
    *,
    B0: int,
    accumulation: int = ACCUMULATION,
    fixed: float = 0.0,
) -> float:
    """GOODPUT(B, b) = B / (T_train(b, B) + fixed) times efficiency; 0 for B = 0.

    ``fixed``: seconds of a round that do not depend on B, a micro-step. The paper's throughput
    leaves them out; in rounds of few steps they are most of the time, and a larger batch then
    costs little.
    """
    if B <= 0:
        return 0.0
    seconds = model.t_train(b, B) + fixed
    return 0.0 if seconds <= 0 else B / seconds * efficiency(B, B0, progress, accumulation)
