"""Latency models of a replica from what it measured: bivariate least squares, slopes >= 0.

Source: CoLLM (arXiv 2604.16400), latency model; the window with forgetting, the outlier rule
and the priors are this project's completion. Pure: samples and ``now`` in, coefficients out.
Seconds, requests, samples, tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.latency import LatencyModel
from shared.nnls import nnls

Floats = NDArray[np.float64]


class Sample(msgspec.Struct, frozen=True):
    """One observation: ``seconds`` took what had the regressors ``x`` and ``y``.

    decode: x = b, y = B; prefill: x = prompt tokens, y = B; training: x = B, y = b.
    """

    time: float
    x: float
    y: float
    seconds: float


class Plane(msgspec.Struct, frozen=True, kw_only=True):
    """seconds = slope_x x + slope_y y + fixed; with the quality of two fits on the same data."""

    slope_x: float
    slope_y: float
    fixed: float
    r2: float  # of this fit
    r2_single: float  # of seconds = slope x + fixed, the model without the second variable
    error: float  # weighted mean of |seconds - fitted| / seconds
    samples: int
    observed_x: bool  # at least two values of x: the slope is measured, not a prior
    observed_y: bool

    def __call__(self, x: float, y: float) -> float:
        return self.slope_x * x + self.slope_y * y + self.fixed


class Window:
    """The newest samples of one kind; older ones fade with half-life ``half_life`` seconds.

    Cells of equal (x, y) share the room, so that the many samples of today's batch size do not
    push out the few that tell the slope.
    """

    def __init__(self, a_cell: int = 64, cells: int = 256, half_life: float = 600.0) -> None:
        self._cells: dict[tuple[float, float], deque[Sample]] = {}
        self._a_cell, self._most, self._half_life = a_cell, cells, half_life

    def add(self, sample: Sample) -> None:
        if not (sample.seconds > 0 and np.isfinite(sample.seconds)):
            return
        key = (sample.x, sample.y)
        self._cells.setdefault(key, deque(maxlen=self._a_cell)).append(sample)
        if len(self._cells) > self._most:
            oldest = min(self._cells, key=lambda k: self._cells[k][-1].time)
            del self._cells[oldest]

    def __len__(self) -> int:
        return sum(len(cell) for cell in self._cells.values())

    def has(self, y: float) -> bool:
        """Whether anything was observed at this value of the second variable."""
        return any(key[1] == y for key in self._cells)

    def samples(self) -> list[Sample]:
        return [s for cell in self._cells.values() for s in cell]

    def fit(
        self, now: float, others: Iterable[Window] = (), usual_y: float | None = None
    ) -> Plane | None:
        """The plane through this window and those of replicas on the same hardware."""
        samples = self.samples()
        for other in others:
            samples += other.samples()
        return fit(samples, now, self._half_life, usual_y)


def fit(
    samples: Sequence[Sample],
    now: float,
    half_life: float = 600.0,
    usual_y: float | None = None,
) -> Plane | None:
    """Weighted least squares with slopes and intercept >= 0; None without samples.

    Outliers go by the median absolute deviation of the residuals, in two passes. A slope whose
    variable took one value only is not identifiable and takes the prior seconds / x or
    seconds / y, never 0; if y was never above 0, ``usual_y`` stands for it: until it is seen, a
    training batch of that size is taken to double an iteration.
    """
    if not samples:
        return None
    x, y, t, weight = _columns(samples, now, half_life)
    keep = np.ones(len(t), dtype=bool)
    solution, seen_x, seen_y = np.zeros(3), False, False
    for _ in range(3):
        solution, seen_x, seen_y = _solve(x[keep], y[keep], t[keep], weight[keep])
        residual = t - _design(x, y) @ solution
        good = _inliers(residual, keep)
        if good.sum() < 3 or np.array_equal(good, keep):
            break
        keep = good
    single = _single(x[keep], t[keep], weight[keep])
    two = _design(x[keep], y[keep]) @ solution
    if not seen_y and y[0] == 0 and usual_y is not None:
        solution[1] = float(np.average(t[keep], weights=weight[keep])) / usual_y
    return Plane(
        slope_x=float(solution[0]),
        slope_y=float(solution[1]),
        fixed=float(solution[2]),
        r2=_r2(t[keep], two, weight[keep]),
        r2_single=_r2(t[keep], single, weight[keep]),
        error=float(np.average(np.abs(t[keep] - two) / t[keep], weights=weight[keep])),
        samples=int(keep.sum()),
        observed_x=seen_x,
        observed_y=seen_y,
    )


def _columns(
    samples: Sequence[Sample], now: float, half_life: float
) -> tuple[Floats, Floats, Floats, Floats]:
    table = np.array([(s.x, s.y, s.seconds, s.time) for s in samples], dtype=np.float64)
    x, y, t, time = table.T
    return x, y, t, np.exp2(-np.maximum(now - time, 0.0) / half_life)


def _design(x: Floats, y: Floats) -> Floats:
    return np.column_stack([x, y, np.ones_like(x)])


def _solve(x: Floats, y: Floats, t: Floats, weight: Floats) -> tuple[Floats, bool, bool]:
    """Coefficients (>= 0) with priors for what cannot be told, and which slopes were told."""
    seen_x, seen_y = np.ptp(x) > 0, np.ptp(y) > 0
    mean = float(np.average(t, weights=weight))
    solution, rest = np.zeros(3), t.copy()
    free = [i for i, seen in enumerate((seen_x, seen_y)) if seen] + [2]
    if not seen_x and x[0] > 0:
        # one value of x: its share of the time cannot be told from the fixed part
        solution[0] = mean / x[0]
        rest, free = rest - solution[0] * x, [i for i in free if i != 2]
    if not seen_y and y[0] > 0 and seen_x:
        # T(y) / y with T the time that is left at this y when x is 0
        line = _nonnegative(_design(x, y)[:, [0, 2]], t, weight)
        solution[1] = line[1] / y[0]
        rest, free = rest - solution[1] * y, [i for i in free if i != 2]
    if free:
        solution[free] = _nonnegative(_design(x, y)[:, free], rest, weight)
    return solution, bool(seen_x), bool(seen_y)


def _nonnegative(design: Floats, t: Floats, weight: Floats) -> Floats:
    root = np.sqrt(weight)
    scale = np.maximum(np.abs(design).max(axis=0), 1e-12)
    solution, _ = nnls(design / scale * root[:, None], t * root)
    return np.asarray(solution / scale)


def _inliers(residual: Floats, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    middle = np.median(residual[keep])
    deviation = 1.4826 * np.median(np.abs(residual[keep] - middle))
    if deviation <= 0:
        return keep
    return np.asarray(np.abs(residual - middle) <= 4.0 * deviation)


def _single(x: Floats, t: Floats, weight: Floats) -> Floats:
    """Prediction of the one-variable fit seconds = slope x + fixed."""
    design = np.column_stack([x, np.ones_like(x)])
    root = np.sqrt(weight)
    solution, *_ = np.linalg.lstsq(design * root[:, None], t * root, rcond=None)
    return np.asarray(design @ solution)


def _r2(t: Floats, predicted: Floats, weight: Floats) -> float:
    mean = np.average(t, weights=weight)
    total = float(np.sum(weight * (t - mean) ** 2))
    left = float(np.sum(weight * (t - predicted) ** 2))
    return 1.0 if total <= 0 else 1.0 - left / total


def latency_model(
    decode: Plane | None, prefill: Plane | None, train: Plane | None
) -> LatencyModel | None:
    """The model the dispatcher uses; None until decoding was observed.

    Without prefill samples a prompt token counts as much as a request's share of a decode step.
    """
    if decode is None:
        return None
    values = {"alpha1": decode.slope_x, "alpha2": decode.slope_y, "alpha0": decode.fixed}
    if prefill is not None:
        values |= {"pi1": prefill.slope_x, "pi2": prefill.slope_y, "pi0": prefill.fixed}
    if train is not None:
        values |= {"gamma1": train.slope_x, "gamma2": train.slope_y, "gamma0": train.fixed}
    return LatencyModel(**values)
