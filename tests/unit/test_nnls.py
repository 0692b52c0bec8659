"""The small solver against scipy's."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.nnls import nnls


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 30))
def test_residual_is_as_small_as_scipys(seed: int, columns: int, rows: int) -> None:
    from scipy.optimize import nnls as reference  # not while tests are collected

    random = np.random.default_rng(seed)
    matrix = random.normal(size=(rows, columns)) * 10.0 ** random.integers(-3, 3, columns)
    target = random.normal(size=rows)
    x, residual = nnls(matrix, target)
    _, best = reference(matrix, target)
    assert (x >= 0).all()
    assert residual == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_columns_that_repeat_or_are_zero_do_no_harm() -> None:
    column = np.arange(5.0)
    matrix = np.stack([column, column, np.zeros(5)], axis=1)
    x, residual = nnls(matrix, 2 * column)
    assert x.sum() == pytest.approx(2)
    assert residual == pytest.approx(0, abs=1e-9)


def test_too_many_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 6"):
        nnls(np.ones((2, 7)), np.ones(2))


def test_it_does_not_import_scipy() -> None:
    code = "import sys, shared.nnls; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
