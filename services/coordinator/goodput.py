"""Training goodput: samples per second times what a sample brings at that batch size.

Source: CoLLM (arXiv 2604.16400) after Pollux (OSDI'21); the noise scale is that of McCandlish
2018. Gradients accumulate over micro-batches: efficiency counts effective batches, latency
models micro-batches.
"""

from __future__ import annotations

import msgspec

from shared.latency import LatencyModel

ACCUMULATION = 8
LEAST_LOSS_REDUCTION = 1e-4
LEAST_NOISE = 1e-12


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a client's last round told about its learning, smoothed over rounds."""

    loss_reduction: float = LEAST_LOSS_REDUCTION  # mean fall of the loss an optimiser step
    noise_scale: float = 16.0  # in samples
    rounds: int = 0

    def updated(
        self, loss_reduction: float | None, noise_scale: float | None, keep: float = 0.5
    ) -> Progress:
        """With a further round; a value that is missing or not finite changes nothing."""
        keep = keep if self.rounds else 0.0
        return Progress(
            loss_reduction=_mix(self.loss_reduction, loss_reduction, keep, LEAST_LOSS_REDUCTION),
            noise_scale=_mix(self.noise_scale, noise_scale, keep, LEAST_NOISE),
            rounds=self.rounds + 1,
        )


def _mix(old: float, new: float | None, keep: float, least: float) -> float:
    if new is None or new != new or new in (float("inf"), float("-inf")):
        return old
    return keep * old + (1 - keep) * max(new, least)


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
) -> float:
    """GOODPUT(B, b) = B / T_train(b, B) times efficiency; 0 for B = 0."""
    if B <= 0:
        return 0.0
    seconds = model.t_train(b, B)
    return 0.0 if seconds <= 0 else B / seconds * efficiency(B, B0, progress, accumulation)
