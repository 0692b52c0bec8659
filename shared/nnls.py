"""Least squares with non-negative coefficients for a handful of columns, without scipy.

scipy's solver costs a process 50 MB of imports; latency models have two or three columns, so
trying every support is exact and quicker than an active-set method.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

MOST_COLUMNS = 6  # 63 small systems

Floats = NDArray[np.float64]


def nnls(matrix: Floats, target: Floats) -> tuple[Floats, float]:
    """(x, |matrix x - target|) with x >= 0 and the least residual, as ``scipy.optimize.nnls``.

    ``matrix`` [rows, columns <= 6]. Raises ValueError for more columns.
    """
    columns = matrix.shape[1]
    if columns > MOST_COLUMNS:
        raise ValueError(f"at most {MOST_COLUMNS} columns, not {columns}")
    gram, moment = matrix.T @ matrix, matrix.T @ target
    energy = float(target @ target)
    best, least = np.zeros(columns), energy
    for size in range(1, columns + 1):
        for support in itertools.combinations(range(columns), size):
            chosen = list(support)
            part = _solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            if part is None or (part < 0).any():
                continue
            residual = energy - float(part @ moment[chosen])
            if residual < least - 1e-12 * energy:
                best, least = np.zeros(columns), residual
                best[chosen] = part
    return best, float(np.linalg.norm(matrix @ best - target))


def _solve(gram: Floats, moment: Floats) -> Floats | None:
    """None for a singular system: a smaller support describes the data as well."""
    scale = np.sqrt(np.diag(gram))
    if (scale == 0).any():
        return None
    scaled = gram / np.outer(scale, scale)
    if np.linalg.cond(scaled) > 1e12:
        return None
    found: Floats = np.linalg.solve(scaled, moment / scale) / scale
    return found
