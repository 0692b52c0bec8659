"""The simulator's percentiles are the load generator's, to a percent."""

from __future__ import annotations

import numpy as np
import pytest

from sim.histogram import Histogram


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 157, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_those_of_the_values(count: int, share: float) -> None:
    values = np.random.default_rng(count).lognormal(0.0, 1.5, count)
    histogram = Histogram()
    for value in values:
        histogram.add(float(value))
    wanted = float(np.percentile(values, 100 * share))
    assert histogram.percentile(share) == pytest.approx(wanted, rel=0.01)


def test_of_nothing_there_is_no_percentile() -> None:
    assert Histogram().percentile(0.5) is None


def test_what_is_shorter_than_the_shortest_bin_counts_as_that() -> None:
    histogram = Histogram()
    histogram.add(0.0)
    histogram.add(1e-9)
    assert histogram.percentile(0.99) == pytest.approx(1e-5)
