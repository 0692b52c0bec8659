"""What training tells the coordinator: gradient noise scale, loss reduction, times.

Noise from the micro-gradients of one optimiser step, after McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training", appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOOR = 1e-12
SMOOTHING = 0.1  # weight of the newest observation, at least; of the n-th it is 1 / n before


@dataclass(frozen=True)
class Noise:
    """Smoothed estimates: squared norm of the true gradient, trace of its covariance."""

    gradient: float  # |G|^2
    trace: float  # tr Sigma, per sample
    count: int = 1  # observations in it

    @property
    def scale(self) -> float:
        """The gradient noise scale in samples."""
        return max(self.trace, FLOOR) / max(self.gradient, FLOOR)


def estimate_noise(micro_squares: Sequence[float], mean_square: float, B: float) -> Noise | None:
    """Unbiased estimates from n micro-gradients of ``B`` samples each.

    ``micro_squares`` are |g_k|^2, ``mean_square`` is |mean g|^2. None for n < 2 or values that
    are not finite. |G|^2 may come out negative: smooth first, clip after.
    """
    n = len(micro_squares)
    if n < 2 or not all(map(math.isfinite, [*micro_squares, mean_square])):
        return None
    mean = sum(micro_squares) / n
    return Noise(
        gradient=(n * mean_square - mean) / (n - 1),
        trace=B * (mean - mean_square) * n / (n - 1),
    )


def smooth(old: Noise | None, new: Noise | None) -> Noise | None:
    """The mean of the first observations, then exponential smoothing; a missing one changes
    nothing.

    With two or three micro-gradients a step a single estimate of |G|^2 is mostly noise, and
    often negative: it takes some ten of them to tell the gradient from it.
    """
    if new is None or old is None:
        return new or old
    weight = max(SMOOTHING, 1 / (old.count + 1))
    return Noise(
        gradient=old.gradient + weight * (new.gradient - old.gradient),
        trace=old.trace + weight * (new.trace - old.trace),
        count=old.count + 1,
    )


def rate_factor(B: int, reference: int) -> float:
    """By how much a step of micro-batch ``B`` may go further than one of ``reference`` (0: any).

    The square root, the usual rule for adaptive optimisers: the training goodput reckons that a
    larger batch learns more a step, and at an unchanged rate it hardly does (docs/tried.md).
    """
    return math.sqrt(B / reference) if reference > 0 else 1.0


def learning_rate(
    base: float, step: int, *, schedule: str, total: int, warmup: int = 0, least: float = 0.1
) -> float:
    """Rate of optimiser step ``step`` (from 0): linear warm-up, then constant or cosine.

    The cosine falls from ``base`` to ``least`` times it at step ``total`` and stays there.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "constant" or total <= warmup:
        return base
    done = min(1.0, (step - warmup) / (total - warmup))
    return base * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done)))
