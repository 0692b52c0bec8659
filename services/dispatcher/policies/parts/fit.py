"""Latency coefficients fitted from the steps that replicas report, until a coordinator has some.

One linear model of a report's duration in what it did:
seconds = alpha1 decoded + alpha0 decode steps + pi1 prefilled + pi0 prefill steps + alpha2 B steps.
Normal equations with forgetting, pooled over replicas as a prior, slopes >= 0.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from numpy.typing import NDArray

from services.dispatcher.policies.base import StepSeen
from services.dispatcher.policies.parts.waiting import CHUNK
from shared.latency import LatencyModel
from shared.nnls import nnls

Matrix = NDArray[np.float64]

FEATURES = 5
FORGET = 0.998  # weight of a report when the next one comes
POOL_WEIGHT = 0.05  # of all replicas' reports beside a replica's own
NEEDED = 10.0  # reports before anything is said: two for each coefficient
FEW = 1000.0  # reports; with more, a fit is no longer news


def work_of(step: StepSeen) -> tuple[float, float]:
    """(steps that decoded, steps that took prompts) of a report, as the fit counts them."""
    prefills = 0.0
    if step.prefill_tokens:
        prefills = min(float(step.steps), max(1.0, step.prefill_tokens / CHUNK))
    return float(min(step.steps, step.decode_tokens)), prefills


class StepFit:
    """Fits of all replicas of a model."""

    def __init__(self) -> None:
        self._own: dict[str, _Sums] = {}
        self._all = _Sums()
        self._changed: dict[str, None] = {}  # replicas with reports since their last fit
        self._pooled: tuple[float, LatencyModel] | None = None  # at this count of reports

    def learn(self, step: StepSeen) -> None:
        """Take in one report; reports of nothing are left out."""
        if step.seconds <= 0 or step.prefill_tokens + step.decode_tokens <= 0:
            return
        decode_steps, prefill_steps = work_of(step)
        row = np.array(
            (
                float(step.decode_tokens),
                decode_steps,
                float(step.prefill_tokens),
                prefill_steps,
                float(step.B * step.steps),
            )
        )
        own = self._own.get(step.replica)
        if own is None:
            own = self._own[step.replica] = _Sums()
        own.add(row, step.seconds)
        self._all.add(row, step.seconds)
        self._changed[step.replica] = None

    def forget(self, replica: str) -> None:
        self._own.pop(replica, None)
        self._changed.pop(replica, None)

    def changed(self, most: int) -> list[str]:
        """Replicas with new reports, those that wait longest first; each is named once."""
        if self._all.count < NEEDED:
            return []
        taken = list(islice(self._changed, most))
        for replica in taken:
            del self._changed[replica]
        return taken

    def grown(self) -> bool:
        """Whether there are twice as many reports as at the last fit: while few, that is news."""
        count = self._all.count
        if self._pooled is None:
            return count >= NEEDED
        return 2 * self._pooled[0] < count < FEW

    def pooled(self) -> LatencyModel | None:
        """Coefficients of a replica that has reported nothing yet: what all of them showed."""
        count = self._all.count
        if count < NEEDED:
            return None
        if self._pooled is None or count > 2 * self._pooled[0]:
            self._pooled = (count, _solve(self._all.square, self._all.cross))
        return self._pooled[1]

    def model(self, replica: str) -> LatencyModel | None:
        """Coefficients of one replica; None until there were enough reports anywhere."""
        if self._all.count < NEEDED:
            return None
        own = self._own.get(replica)
        square, cross = self._all.square * POOL_WEIGHT, self._all.cross * POOL_WEIGHT
        if own is not None:
            square, cross = square + own.square, cross + own.cross
        return _solve(square, cross)


class _Sums:
    def __init__(self) -> None:
        self.square: Matrix = np.zeros((FEATURES, FEATURES))
        self.cross: Matrix = np.zeros(FEATURES)
        self.count = 0.0

    def add(self, row: Matrix, seconds: float) -> None:
        # Weighted by 1/seconds: relative errors count, not the longest reports.
        weight = 1.0 / max(seconds, 1e-4)
        self.square *= FORGET
        self.cross *= FORGET
        self.square += weight * np.outer(row, row)
        self.cross += weight * seconds * row
        self.count += 1.0


def _solve(square: Matrix, cross: Matrix) -> LatencyModel:
    """Least squares with coefficients >= 0, from normal equations scaled to unit diagonal."""
    scale = np.sqrt(np.maximum(np.diag(square), 1e-12))
    normal = square / np.outer(scale, scale) + 1e-6 * np.eye(FEATURES)
    factor = np.linalg.cholesky(normal).T
    target = np.linalg.solve(factor.T, cross / scale)
    solution, _ = nnls(factor, target)
    alpha1, alpha0, pi1, pi0, alpha2 = (float(v) for v in solution / scale)
    return LatencyModel(alpha1=alpha1, alpha0=alpha0, alpha2=alpha2, pi1=pi1, pi0=pi0, pi2=alpha2)
