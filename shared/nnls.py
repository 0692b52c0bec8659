"""Least squares with non-negative coefficients for a handful of columns, without scipy.

scipy's solver costs a process 50 MB of imports; latency models have two or three columns, so
trying every support is exact and quicker than an active-set method.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_COLUMNS = 6  # 63 small systems

RIDGE = 1e-13  # of columns of length 1: keeps repeated columns solvable

REFINEMENTS = 2
ROUNDING = 1e-10  # of the target: a smaller residual is 0

Floats = NDArray[np.float64]
Numbers = NDArray[np.floating[Any]]


def nnls(matrix: Numbers, target: Numbers) -> tuple[Floats, float]:
    """(x, |matrix x - target|) with x >= 0 and the least residual, as ``scipy.optimize.nnls``.

    ``matrix`` [rows, columns <= 6]. Raises ValueError for more columns.
    """
    columns = matrix.shape[1]
    if columns > MOST_COLUMNS:
        raise ValueError(f"at most {MOST_COLUMNS} columns, not {columns}")
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    scale[scale == 0.0] = 1.0
    unit = matrix / scale
    gram, moment = unit.T @ unit, unit.T @ target
    gram[np.diag_indices(columns)] += RIDGE
    slack = 1e-9 * float(np.sqrt(target @ target))
    best, least = np.zeros(columns), float("inf")
    for support in _supports(columns):
        x = np.zeros(columns)
        x[support] = np.linalg.solve(gram[support][:, support], moment[support])
        if x.min(initial=0.0) < 0.0:
            continue
        value = float(x @ (gram @ x) - 2.0 * (x @ moment))
        if value < least:
            best, least = x, value
        if (gram @ x - moment).min(initial=0.0) >= -slack:
            break  # no direction into the feasible set goes down
    best = _refined(best, unit, gram, target) / scale
    return best, float(np.linalg.norm(matrix @ best - target))


def _refined(x: Floats, unit: Floats, gram: Floats, target: Numbers) -> Floats:
    """What the ridge and squaring the columns have lost, from the residual itself, twice."""
    support = np.flatnonzero(x > 0)
    chosen, system = unit[:, support], gram[np.ix_(support, support)]
    for _ in range(REFINEMENTS if len(support) else 0):
        rest = target - chosen @ x[support]
        if rest @ rest <= ROUNDING**2 * (target @ target):
            break
        better = x[support] + np.linalg.solve(system, chosen.T @ rest)
        if better.min() < 0.0:
            break
        x[support] = better
    return x


def _supports(columns: int) -> Iterator[list[int]]:
    """Sets of columns that may be above 0, the largest first, down to none."""
    for size in range(columns, -1, -1):
        for support in itertools.combinations(range(columns), size):
            yield list(support)
