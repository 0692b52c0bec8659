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

from services.coordinator.shapes import PLANE, Floats, Shape, nonnegative, select
from shared.latency import LatencyModel

LEAST = 1e-6  # seconds: no time is taken to be shorter where errors are made relative


class Sample(msgspec.Struct, frozen=True):
    """One observation: ``seconds`` took what had the regressors ``x`` and ``y``.

    decode: x = b, y = B; prefill: x = prompt tokens, y = B; training: x = B, y = b.
    """

    time: float
    x: float
    y: float
    seconds: float


class Plane(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted ``Shape``, with the quality of two fits on the same data."""

    slope_x: float
    slope_y: float
    fixed: float
    r2: float  # of this fit
    r2_single: float  # of seconds = slope x + fixed, the model without the second variable
    error: float  # weighted mean of |seconds - fitted| / seconds
    samples: int
    observed_x: bool  # at least two values of x: the slope is measured, not a prior
    observed_y: bool
    cross: float = 0.0
    flat: float = 0.0

    def __call__(self, x: float, y: float) -> float:
        felt = min(y, self.flat) if self.flat > 0 else y
        return (self.slope_x + self.cross * felt) * x + self.slope_y * felt + self.fixed


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
        self,
        now: float,
        others: Iterable[Window] = (),
        usual_y: float | None = None,
        *,
        shaped: bool = False,
    ) -> Plane | None:
        """The plane through this window and those of replicas on the same hardware."""
        samples = self.samples()
        for other in others:
            samples += other.samples()
        return fit(samples, now, self._half_life, usual_y, shaped=shaped)


def fit(
    samples: Sequence[Sample],
    now: float,
    half_life: float = 600.0,
    usual_y: float | None = None,
    *,
    shaped: bool = False,
) -> Plane | None:
    """Weighted least squares with coefficients >= 0; None without samples.

    Errors count relative to the time itself: a step of 200 ms scatters more than one of 20 ms.
    Outliers go by the median absolute deviation of the residuals, in two passes. A slope whose
    variable took one value only is not identifiable and takes the prior seconds / x or
    seconds / y, never 0; if y was never above 0, ``usual_y`` stands for it: until it is seen, a
    training batch of that size is taken to double an iteration.

    ``shaped``: of the shapes that the pairs seen can tell apart, the one that predicts pairs
    left out of its fit best; else the plane.
    """
    if not samples:
        return None
    x, y, t, weight = _columns(samples, now, half_life)
    keep = np.ones(len(t), dtype=bool)
    shape = select(x, y, t, weight) if shaped else PLANE
    fitted = t
    for _ in range(3):
        scaled = weight / np.maximum(fitted, LEAST) ** 2
        solution, seen_x, seen_y = _solve(shape, x[keep], y[keep], t[keep], scaled[keep])
        fitted = shape.columns(x, y) @ solution
        good = _inliers((t - fitted) / np.maximum(fitted, LEAST), keep)
        if good.sum() < 3:
            break
        keep = good
    return _plane(shape, solution, (x, y, t, weight), keep, (seen_x, seen_y), usual_y)


def _plane(
    shape: Shape,
    solution: Floats,
    data: tuple[Floats, Floats, Floats, Floats],
    keep: NDArray[np.bool_],
    seen: tuple[bool, bool],
    usual_y: float | None,
) -> Plane:
    x, y, t, weight = (column[keep] for column in data)
    two = shape.columns(x, y) @ solution
    if not seen[1] and y[0] == 0 and usual_y is not None:
        solution[1] = float(np.average(t, weights=weight)) / usual_y
    return Plane(
        slope_x=float(solution[0]),
        slope_y=float(solution[1]),
        fixed=float(solution[2]),
        cross=float(solution[3]) if shape.crossed else 0.0,
        flat=shape.flat,
        r2=_r2(t, two, weight),
        r2_single=_r2(t, _single(x, t, weight), weight),
        error=float(np.average(np.abs(t - two) / t, weights=weight)),
        samples=int(keep.sum()),
        observed_x=seen[0],
        observed_y=seen[1],
    )


def _columns(
    samples: Sequence[Sample], now: float, half_life: float
) -> tuple[Floats, Floats, Floats, Floats]:
    table = np.array([(s.x, s.y, s.seconds, s.time) for s in samples], dtype=np.float64)
    x, y, t, time = table.T
    return x, y, t, np.exp2(-np.maximum(now - time, 0.0) / half_life)


def _solve(
    shape: Shape, x: Floats, y: Floats, t: Floats, weight: Floats
) -> tuple[Floats, bool, bool]:
    """Coefficients (>= 0) with priors for what cannot be told, and which slopes were told."""
    seen_x, seen_y = np.ptp(x) > 0, np.ptp(y) > 0
    design = shape.columns(x, y)
    mean = float(np.average(t, weights=weight))
    solution, rest = np.zeros(design.shape[1]), t.copy()
    free = [i for i, seen in enumerate((seen_x, seen_y)) if seen] + [*range(2, len(solution))]
    if not seen_x and x[0] > 0:
        # one value of x: its share of the time cannot be told from the fixed part
        solution[0] = mean / x[0]
        rest, free = rest - solution[0] * x, [i for i in free if i != 2]
    if not seen_y and y[0] > 0 and seen_x:
        # T(y) / y with T the time that is left at this y when x is 0
        line = nonnegative(design[:, [0, 2]], t, weight)
        solution[1] = line[1] / y[0]
        rest, free = rest - solution[1] * y, [i for i in free if i != 2]
    if free:
        solution[free] = nonnegative(design[:, free], rest, weight)
    return solution, bool(seen_x), bool(seen_y)


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
    if total <= 1e-24 * float(np.sum(weight * t**2)):
        return 1.0  # equal up to rounding: nothing is left to explain
    return 1.0 - left / total


def latency_model(
    decode: Plane | None, prefill: Plane | None, train: Plane | None
) -> LatencyModel | None:
    """The model the dispatcher uses; None until decoding was observed.

    Without prefill samples a prompt token counts as much as a request's share of a decode step.
    """
    if decode is None:
        return None
    values = {"alpha1": decode.slope_x, "alpha2": decode.slope_y, "alpha0": decode.fixed}
    values |= {"alpha3": decode.cross, "flat": decode.flat}
    if prefill is not None:
        values |= {"pi1": prefill.slope_x, "pi2": prefill.slope_y, "pi0": prefill.fixed}
    if train is not None:
        values |= {"gamma1": train.slope_x, "gamma2": train.slope_y, "gamma0": train.fixed}
    return LatencyModel(**values)
