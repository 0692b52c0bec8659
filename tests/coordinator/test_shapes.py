"""Which shape of a latency model a replica's samples speak for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from services.coordinator.fit import Sample, fit, latency_model
from services.coordinator.shapes import PLANE, Shape, nonnegative, select

XS, YS = (1, 2, 4, 8), (0, 2, 4, 8)


def chosen(
    law: Callable[[float, float], float],
    xs: Sequence[float] = XS,
    ys: Sequence[float] = YS,
    wild: float = 1.0,
) -> Shape:
    """Of samples that follow a law; of each five the last is ``wild`` times as long."""
    rows = [(x, y, law(x, y) * factor) for x in xs for y in ys for factor in (1, 1, 1, 1, wild)]
    x, y, t = np.array(rows, dtype=float).T
    return select(x, y, t, np.ones(len(t)))


def plane(x: float, y: float) -> float:
    return 0.1 + 0.02 * x + 0.05 * y


def flat(x: float, y: float) -> float:
    return 0.1 + 0.02 * x + 0.05 * min(y, 2)


def crossed(x: float, y: float) -> float:
    return 0.1 + 0.02 * x + 0.03 * x * y


def test_columns_are_those_of_the_formula() -> None:
    x, y = np.array([2.0, 3.0]), np.array([1.0, 5.0])
    assert PLANE.columns(x, y).tolist() == [[2, 1, 1], [3, 5, 1]]
    assert Shape(4.0, True).columns(x, y).tolist() == [[2, 1, 1, 2], [3, 4, 1, 12]]
    assert PLANE.felt(y).tolist() == [1, 5]


def test_the_shape_behind_the_samples_is_chosen() -> None:
    assert chosen(plane) == PLANE
    assert chosen(flat) == Shape(flat=2.0)
    assert chosen(crossed) == Shape(crossed=True)
    assert chosen(lambda x, y: 0.1 + 0.03 * x * min(y, 4)) == Shape(flat=4.0, crossed=True)


def test_the_middle_of_each_pair_counts() -> None:
    assert chosen(plane, wild=50.0) == PLANE
    assert chosen(flat, wild=50.0) == Shape(flat=2.0)


def test_a_shape_that_is_hardly_better_is_not_chosen() -> None:
    rng = np.random.default_rng(5)
    assert chosen(lambda x, y: plane(x, y) * rng.normal(1.0, 0.05)) == PLANE


@pytest.mark.parametrize(
    ("xs", "ys"), [((1, 2, 4, 8, 16, 32), (2,)), ((2,), (0, 1, 2, 4, 8, 16)), ((1, 2), (0, 4))]
)
def test_where_nothing_tells_them_apart_it_is_the_plane(xs: list[int], ys: list[int]) -> None:
    assert chosen(crossed, xs, ys) == PLANE


def test_six_pairs_are_enough() -> None:
    assert chosen(crossed, (1, 4, 8), (0, 4)) == Shape(crossed=True)


def test_a_flat_end_lies_at_one_of_the_first_sizes_below_the_largest() -> None:
    def law(end: float) -> Shape:
        return chosen(lambda x, y: 0.1 + 0.02 * x + 0.05 * min(y, end), ys=(0, 1, 2, 3, 4, 5))

    assert law(3) == Shape(flat=3.0)
    assert law(5) == PLANE


def test_heavier_pairs_count_more() -> None:
    """The pairs of x above 2 follow a plane, the others do not."""
    rows = [(x, y, plane(x, y) if x > 2 else flat(x, y)) for x in XS for y in YS]
    x, y, t = np.array(rows, dtype=float).T
    heavy = np.where(x > 2, 1e6, 1e-6)
    assert select(x, y, t, heavy) == PLANE
    assert select(x, y, t, 1 / heavy).flat == 2.0


def test_coefficients_are_not_below_nothing_and_heed_weights() -> None:
    design = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    falling = np.array([3.0, 2.0, 1.0])
    assert nonnegative(design, falling, np.ones(3)).tolist() == pytest.approx([0.0, 2.0])
    weighted = nonnegative(design, falling, np.array([1.0, 0.0, 0.0]))
    assert weighted @ design[0] == pytest.approx(3.0)
    exact = nonnegative(design * [1e6, 1.0], np.array([3.0, 5.0, 7.0]), np.array([1.0, 2.0, 3.0]))
    assert exact == pytest.approx([2e-6, 1.0])


def test_a_fit_takes_the_shape_along() -> None:
    samples = [Sample(0.0, x, y, crossed(x, min(y, 4))) for x in XS for y in YS for _ in range(3)]
    result = fit(samples, 0.0, shaped=True)
    assert result is not None
    assert (result.cross, result.flat) == (pytest.approx(0.03), 4.0)
    assert result.error == pytest.approx(0.0, abs=1e-6)
    assert result(3, 9) == pytest.approx(crossed(3, 4))
    assert result(3, 2) == pytest.approx(crossed(3, 2))
    model = latency_model(result, None, None)
    assert model is not None
    assert (model.alpha3, model.flat) == (pytest.approx(0.03), 4.0)
    plain = fit(samples, 0.0)
    assert plain is not None
    assert (plain.cross, plain.flat) == (0.0, 0.0)
    assert plain.error > 0.05
