"""Quality score Q of an adapter version.

Starts at 1; after a round Q(new) = Q(parent) clip(F(t-1) / F(t), 1/2, 2) with F the training
loss of the round, a mean over clients weighted by samples. Source: CoLLM (arXiv 2604.16400);
the clipped form is this project's completion.
"""

from __future__ import annotations

from collections.abc import Iterable

STEP_MAX = 2.0
MIN_CE = 0.05  # nats per token; keeps the quality of an answer, 1 / cross-entropy, finite


def after_round(parent: float, before: float | None, after: float | None) -> float:
    """Q of the version that a round produced; losses in nats per token, None = unknown."""
    if before is None or after is None or before <= 0 or after <= 0:
        return parent
    return parent * min(max(before / after, 1 / STEP_MAX), STEP_MAX)


def weighted_mean(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    """Mean of (value, weight) pairs without the unknown values; None if nothing is left."""
    known = [(v, w) for v, w in pairs if v is not None and w > 0]
    total = sum(w for _, w in known)
    return sum(v * w for v, w in known) / total if total else None
