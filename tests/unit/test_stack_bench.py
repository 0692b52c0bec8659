"""Quantiles from two readings of a histogram."""

from __future__ import annotations

import math

import pytest

from bench.stack import quantile

BEFORE = {0.001: 10.0, 0.005: 20.0, math.inf: 20.0}


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        ({0.001: 110.0, 0.005: 120.0, math.inf: 120.0}, 0.00099),
        ({0.001: 10.0, 0.005: 120.0, math.inf: 120.0}, 0.001 + 0.004 * 0.99),
        ({0.001: 10.0, 0.005: 20.0, math.inf: 120.0}, 0.005),
    ],
)
def test_only_what_came_between_the_readings_counts(
    after: dict[float, float], wanted: float
) -> None:
    assert quantile(BEFORE, after, 0.99) == pytest.approx(wanted)


def test_without_observations_there_is_no_quantile() -> None:
    assert quantile(BEFORE, BEFORE, 0.99) is None
    assert quantile({}, {}, 0.99) is None


def test_a_histogram_that_was_not_there_before_began_at_0() -> None:
    assert quantile({}, {0.001: 100.0, math.inf: 100.0}, 0.5) == pytest.approx(0.0005)
