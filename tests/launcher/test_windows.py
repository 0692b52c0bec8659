"""Windows: weights, quantiles, lengths that follow volatility."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.windows import Load, LoadWindow, length, quantile, volatility


def load(u: float, queued: float = 0.0, b: float = 0.0) -> Load:
    return Load(utilisation=u, queued=queued, b=b)


def test_the_mean_weighs_samples_by_the_papers_formula() -> None:
    window = LoadWindow(10, 0.1)
    values = [0.9, 0.1, 0.4, 0.7]
    for value in values:
        window.add(load(value, value * 2, value * 3))
    mean = window.mean(3)
    weights = [math.exp(-0.1 * age) for age in (2, 1, 0)]
    wanted = sum(w * v for w, v in zip(weights, values[1:], strict=True)) / sum(weights)
    assert mean is not None
    assert (mean.utilisation, mean.queued, mean.b) == pytest.approx(
        (wanted, 2 * wanted, 3 * wanted)
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(0, 1))
def test_a_mean_lies_between_its_samples(values: list[float], decay: float) -> None:
    window = LoadWindow(20, decay)
    for value in values:
        window.add(load(value))
    mean = window.mean(20)
    assert mean is not None
    assert min(values[-20:]) - 1e-9 <= mean.utilisation <= max(values[-20:]) + 1e-9


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_equal_numpys(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(0, 1e3), max_size=60), st.integers(1, 200))
def test_lengths_stay_in_bounds_and_grow_with_volatility(values: list[float], base: int) -> None:
    cv = volatility(values)
    assert cv >= 0
    assert 10 <= length(base, cv, 10, 120) <= 120
    assert length(base, cv + 1, 10, 120) >= length(base, cv, 10, 120)
    assert volatility([5.0] * 10) == 0.0


def test_a_cleared_window_starts_anew() -> None:
    window = LoadWindow(5, 0.1)
    window.add(load(0.5))
    window.clear()
    assert window.mean(5) is None
