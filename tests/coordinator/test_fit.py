"""Latency fits: known planes come back, outliers and one-sided data do no harm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.fit import Plane, Sample, Window, fit, latency_model


def plane(
    sx: float, sy: float, fixed: float, xs: list[int], ys: list[int], noise: float = 0.0
) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(0.0, x, y, (sx * x + sy * y + fixed) * float(rng.normal(1.0, noise)))
        for x in xs
        for y in ys
        for _ in range(10)
    ]


def found(samples: list[Sample], now: float = 0.0) -> Plane:
    result = fit(samples, now)
    assert result is not None
    return result


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(1e-4, 0.1), st.floats(1e-4, 0.5))
def test_an_exact_plane_is_found(sx: float, sy: float, fixed: float) -> None:
    result = found(plane(sx, sy, fixed, [1, 4, 8, 16], [0, 4, 8]))
    assert (result.slope_x, result.slope_y, result.fixed) == pytest.approx(
        (sx, sy, fixed), rel=1e-5
    )
    assert result.r2 == pytest.approx(1.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 16), st.floats(1e-5, 10.0)),
        min_size=1,
        max_size=40,
    )
)
def test_slopes_are_never_negative_nor_infinite(rows: list[tuple[int, int, float]]) -> None:
    result = found([Sample(0.0, x, y, t) for x, y, t in rows])
    for value in (result.slope_x, result.slope_y, result.fixed):
        assert value >= 0
        assert np.isfinite(value)


def test_two_variables_explain_what_one_cannot_under_training() -> None:
    result = found(plane(0.002, 0.01, 0.05, [1, 2, 4, 8], [0, 4, 8], noise=0.02))
    assert result.r2 > 0.95
    assert result.r2_single < 0.3


def test_a_tenth_of_wild_outliers_changes_little() -> None:
    samples = plane(0.002, 0.01, 0.05, [1, 2, 4, 8], [0, 4, 8], noise=0.01)
    wild = [
        Sample(0.0, s.x, s.y, s.seconds * 30) if i % 10 == 0 else s for i, s in enumerate(samples)
    ]
    result = found(wild)
    assert result.slope_x == pytest.approx(0.002, rel=0.2)
    assert result.slope_y == pytest.approx(0.01, rel=0.2)
    assert result.fixed == pytest.approx(0.05, rel=0.1)


def test_a_slope_that_was_not_observed_takes_the_prior_and_never_zero() -> None:
    """With alpha2 = 0 training would look free, with alpha1 = 0 b* would be b_max."""
    only_b4 = found([Sample(0.0, 4, 0, 0.2)] * 5)
    assert (only_b4.slope_x, only_b4.observed_x, only_b4.fixed) == (pytest.approx(0.05), False, 0.0)
    always_training = found([Sample(0.0, b, 8, 0.1 + 0.01 * b) for b in (1, 2, 4)])
    assert always_training.slope_x == pytest.approx(0.01)
    assert always_training.slope_y == pytest.approx(0.1 / 8)
    assert not always_training.observed_y


def test_training_that_was_never_seen_beside_decoding_is_not_taken_to_be_free() -> None:
    samples = [Sample(0.0, b, 0, 0.1 + 0.01 * b) for b in (1, 2, 4)]
    result = fit(samples, 0.0, usual_y=4)
    assert result is not None
    assert result.slope_y == pytest.approx(sum(s.seconds for s in samples) / 3 / 4)
    assert result(2, 0) == pytest.approx(0.12)
    seen = fit([*samples, Sample(0.0, 2, 4, 0.13)], 0.0, usual_y=4)
    assert seen is not None
    assert seen.slope_y == pytest.approx(0.0025, rel=0.05)


def test_old_samples_fade() -> None:
    old = [Sample(0.0, b, 0, 0.1 * b) for b in (1, 2, 4)] * 10
    new = [Sample(6000.0, b, 0, 0.3 * b) for b in (1, 2, 4)] * 10
    assert found(old + new, now=6000.0).slope_x == pytest.approx(0.3, rel=0.01)


def test_many_samples_of_one_batch_size_do_not_push_out_the_few_that_tell_the_slope() -> None:
    window = Window(a_cell=8)
    for b in (1, 8):
        window.add(Sample(0.0, b, 0, 0.1 + 0.01 * b))
    for i in range(10_000):
        window.add(Sample(float(i) / 1000, 4, 0, 0.14))
    result = window.fit(10.0)
    assert result is not None
    assert len(window) == 10
    assert result.slope_x == pytest.approx(0.01, rel=0.05)


def test_replicas_on_the_same_hardware_pool_their_samples() -> None:
    mine, other = Window(), Window()
    mine.add(Sample(0.0, 1, 0, 0.11))
    other.add(Sample(0.0, 8, 0, 0.18))
    other.add(Sample(0.0, 4, 4, 0.22))
    result = mine.fit(0.0, [other])
    assert result is not None
    assert result.observed_x
    assert result.slope_x == pytest.approx(0.01, rel=0.01)


def test_no_samples_and_nonsense_samples_make_no_model() -> None:
    window = Window()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        window.add(Sample(0.0, 1, 0, seconds))
    assert window.fit(0.0) is None
    assert latency_model(None, None, None) is None


def shaped(seconds: Callable[[int, int], float], noise: float = 0.02) -> Plane:
    """The fit through a grid that ``seconds(b, B)`` made."""
    rng = np.random.default_rng(0)
    grid = [(b, B) for b in (1, 2, 4, 8, 16) for B in (0, 2, 4, 8)]
    result = fit(
        [
            Sample(0.0, b, B, seconds(b, B) * float(rng.normal(1.0, noise)))
            for b, B in grid
            for _ in range(20)
        ],
        0.0,
        shaped=True,
    )
    assert result is not None
    return result


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_plane_stays_a_plane(noise: float) -> None:
    result = shaped(lambda b, B: 0.002 * b + 0.01 * B + 0.05, noise)
    assert (result.cross, result.flat) == (0.0, 0.0)


def test_training_that_takes_a_core_whatever_its_batch_is_told_from_one_that_takes_more() -> None:
    result = shaped(lambda b, B: 0.002 * b + (0.08 if B else 0.05))
    assert 0 < result.flat <= 2
    assert result(4, 8) == pytest.approx(0.088, rel=0.02)
    assert result(4, 0) == pytest.approx(0.058, rel=0.02)


def test_training_that_slows_every_request_of_an_iteration_has_a_product() -> None:
    result = shaped(lambda b, B: (0.002 * b + 0.02) * (1 + 0.2 * B))
    assert result.cross == pytest.approx(0.0004, rel=0.1)
    assert result(16, 8) == pytest.approx(0.052 * 2.6, rel=0.03)


def test_the_model_for_the_dispatcher_says_what_the_fit_says() -> None:
    result = shaped(lambda b, B: (0.002 * b + 0.02) * (1.8 if B else 1.0))
    model = latency_model(result, None, None)
    assert model is not None
    for b, B in ((1, 0), (16, 0), (3, 2), (16, 8)):
        assert model.t_infer(b, B) == pytest.approx(result(b, B))
        assert model.t_infer(b, B) == pytest.approx(
            (0.002 * b + 0.02) * (1.8 if B else 1.0), rel=0.03
        )


def test_too_few_pairs_make_no_other_shape_than_the_plane() -> None:
    samples = [Sample(0.0, b, B, (0.01 * b + 0.02) * (1 + B)) for b in (1, 4) for B in (0, 4)]
    result = fit(samples, 0.0, shaped=True)
    assert result is not None
    assert (result.cross, result.flat) == (0.0, 0.0)
