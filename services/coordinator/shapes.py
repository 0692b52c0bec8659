"""Shapes of a latency model in two variables, and which of them a replica's samples speak for.

The paper (CoLLM, arXiv 2604.16400) has one: a plane. Where training takes cores instead of a
share of every core, it misses twice: each request of an iteration then takes longer, not the
iteration alone, and a larger micro-batch holds the cores longer but takes no more of them.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.nnls import nnls

Floats = NDArray[np.float64]

LEAST_CELLS = 6  # pairs (x, y) below which no other shape than the plane is asked
MOST_FLATS = 3
FOLDS = 6
BETTER = 0.05  # part of the error by which a less simple shape must be better


class Shape(msgspec.Struct, frozen=True):
    """How the second variable acts. seconds = slope_x x + slope_y y' + cross x y' + fixed.

    y' = y up to ``flat`` and ``flat`` beyond it (0: without end); ``crossed``: with the product,
    else cross = 0. The default is the paper's plane.
    """

    flat: float = 0.0
    crossed: bool = False

    def felt(self, y: Floats) -> Floats:
        return np.minimum(y, self.flat) if self.flat > 0 else y

    def columns(self, x: Floats, y: Floats) -> Floats:
        """Columns of slope_x, slope_y, fixed and, if crossed, cross."""
        felt = self.felt(y)
        plain = [x, felt, np.ones_like(x)]
        return np.column_stack([*plain, x * felt] if self.crossed else plain)


PLANE = Shape()


def select(x: Floats, y: Floats, t: Floats, weight: Floats) -> Shape:
    """The shape that predicts cells of equal (x, y) left out of its fit best.

    A shape is asked only where there is something to tell it by: a product needs two values of
    x at two of y; a flat end two values of y above 0. Simpler ones win unless another is
    better by ``BETTER``.
    """
    cells = _cells(x, y, t, weight)
    positive = sorted({float(v) for v in cells[1] if v > 0})
    if len(cells[0]) < LEAST_CELLS or np.ptp(cells[0]) == 0 or np.ptp(cells[1]) == 0:
        return PLANE
    flats = [0.0, *positive[:-1][:MOST_FLATS]]
    shapes = [Shape(flat, crossed) for crossed in (False, True) for flat in flats]
    best, least = PLANE, math.inf
    for shape in shapes:
        error = _left_out(shape, *cells)
        if error < least * (1 - BETTER):
            best, least = shape, error
    return best


def _cells(x: Floats, y: Floats, t: Floats, weight: Floats) -> tuple[Floats, ...]:
    """x, y, median seconds and weight of each pair (x, y)."""
    pairs, place = np.unique(np.column_stack([x, y]), axis=0, return_inverse=True)
    place = place.ravel()
    middle = np.array([np.median(t[place == i]) for i in range(len(pairs))])
    total = np.array([np.sqrt(weight[place == i].sum()) for i in range(len(pairs))])
    return pairs[:, 0], pairs[:, 1], middle, total


def _left_out(shape: Shape, x: Floats, y: Floats, t: Floats, weight: Floats) -> float:
    """Weighted mean of |predicted - seconds| / seconds over cells, each in a fold left out."""
    folds = np.random.default_rng(0).permutation(len(t)) % FOLDS  # no whole row or column
    errors = np.zeros(len(t))
    scaled = weight / t**2
    for fold in range(FOLDS):
        out = folds == fold
        if not out.any():
            continue
        rest = ~out
        solution = nonnegative(shape.columns(x[rest], y[rest]), t[rest], scaled[rest])
        predicted = shape.columns(x[out], y[out]) @ solution
        errors[out] = np.abs(predicted - t[out]) / t[out]
    return float(np.average(errors, weights=weight))


def nonnegative(design: Floats, t: Floats, weight: Floats) -> Floats:
    root = np.sqrt(weight)
    scale = np.maximum(np.abs(design).max(axis=0), 1e-12)
    solution, _ = nnls(design / scale * root[:, None], t * root)
    return np.asarray(solution / scale)
