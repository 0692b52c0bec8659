"""The fit of a plane, value by value: weights, priors, outliers, quality, windows."""

from __future__ import annotations

import numpy as np
import pytest

from services.coordinator.fit import Plane, Sample, Window, fit, latency_model


def at(x: float, y: float, seconds: float, time: float = 0.0) -> Sample:
    return Sample(time, x, y, seconds)


def found(samples: list[Sample], now: float = 0.0, **more: float) -> Plane:
    result = fit(samples, now, **more)
    assert result is not None
    return result


# x 1..4, y 0 and 2: seconds = 0.1 x + 0.2 y + 0.3
EXACT = [at(x, y, 0.1 * x + 0.2 * y + 0.3) for x in (1, 2, 3, 4) for y in (0, 2)]


def test_an_exact_plane_has_all_of_it() -> None:
    result = found(EXACT)
    assert (result.slope_x, result.slope_y, result.fixed) == pytest.approx((0.1, 0.2, 0.3))
    assert (result.r2, result.error) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
    assert (result.samples, result.observed_x, result.observed_y) == (8, True, True)
    assert result(5, 3) == pytest.approx(0.5 + 0.6 + 0.3)
    # of the variance 0.0125 + 0.04 the first variable explains the first part
    assert result.r2_single == pytest.approx(0.0125 / 0.0525)


def test_a_sample_weighs_half_after_a_half_life() -> None:
    old, new = [at(1, 0, 1.0, time=0.0)] * 2, [at(1, 0, 4.0, time=100.0)] * 2
    assert found([*old, *new], 100.0, half_life=100.0).slope_x == pytest.approx((0.5 + 4) / 1.5)
    assert found([*old, *new], 100.0, half_life=50.0).slope_x == pytest.approx((0.25 + 4) / 1.25)
    assert found([*old, *new], -5.0, half_life=50.0).slope_x == pytest.approx(2.5), (
        "not yet measured"
    )
    six = [at(1, 0, 1.0, time=0.0), at(1, 0, 4.0, time=600.0)] * 2
    assert found(six, 600.0).slope_x == pytest.approx((0.5 + 4) / 1.5), "ten minutes are usual"


def test_weights_count_in_the_slopes_and_the_quality() -> None:
    """Of two lines the newer one wins as its weight says."""
    old = [at(x, 0, 0.1 * x + 0.1) for x in (1, 2, 3)]
    new = [at(x, 0, 0.3 * x + 0.1, time=10.0) for x in (1, 2, 3)]
    result = found(old + new, 10.0, half_life=10.0)
    assert result.slope_x == pytest.approx((0.5 * 0.1 + 0.3) / 1.5)
    assert result.fixed == pytest.approx(0.1)
    t = np.array([0.2, 0.3, 0.4, 0.4, 0.7, 1.0])
    weight = np.array([0.5] * 3 + [1.0] * 3)
    fitted = np.array([result(x, 0) for x in (1, 2, 3, 1, 2, 3)])
    mean = np.average(t, weights=weight)
    left, total = ((weight * (t - m) ** 2).sum() for m in (fitted, mean))
    assert result.r2 == pytest.approx(1 - left / total)
    assert result.r2_single == pytest.approx(result.r2)
    assert result.error == pytest.approx(np.average(np.abs(t - fitted) / t, weights=weight))


def test_one_value_explains_everything() -> None:
    result = found([at(2, 0, 0.4)] * 3)
    assert (result.r2, result.r2_single, result.samples) == (1.0, 1.0, 3)


# ------------------------------------------------------------ priors


def test_one_value_of_x_takes_all_of_the_time() -> None:
    result = found([at(4, 0, 0.2), at(4, 0, 0.4)] * 2)
    assert (result.slope_x, result.slope_y, result.fixed) == (pytest.approx(0.075), 0.0, 0.0)
    assert (result.observed_x, result.observed_y) == (False, False)


def test_one_value_of_x_with_training_observed_gives_the_rest_to_training() -> None:
    """The mean, in which relative errors count, is x's; what is more with y is y's."""
    result = found([at(3, 0, 0.3), at(3, 0, 0.3), at(3, 2, 0.9)])
    weight = np.array([1.0, 1.0, (result(3, 0) / result(3, 2)) ** 2])
    mean = np.average([0.3, 0.3, 0.9], weights=weight)
    assert result.slope_x == pytest.approx(mean / 3, rel=0.05)
    assert result(3, 2) == pytest.approx(0.9)
    assert (result.fixed, result.observed_x, result.observed_y) == (0.0, False, True)


def test_x_of_nothing_leaves_the_fixed_part() -> None:
    result = found([at(0, 0, 0.2), at(0, 0, 0.4)] * 2)
    assert (result.slope_x, result.slope_y, result.fixed) == (0.0, 0.0, pytest.approx(0.3))


def test_one_value_of_y_takes_what_is_left_without_x() -> None:
    result = found([at(x, 4, 0.1 * x + 0.2) for x in (1, 2, 4)])
    assert (result.slope_x, result.slope_y, result.fixed) == pytest.approx((0.1, 0.05, 0.0))
    assert (result.observed_x, result.observed_y) == (True, False)


def test_one_value_of_both_counts_for_x() -> None:
    result = found([at(2, 4, 0.4)])
    assert (result.slope_x, result.slope_y, result.fixed) == (pytest.approx(0.2), 0.0, 0.0)


def test_training_that_was_never_seen_doubles_an_iteration_at_its_usual_size() -> None:
    samples = [at(x, 0, 0.1 * x + 0.2) for x in (1, 2, 3)]
    result = found(samples, usual_y=8)
    assert result.slope_y == pytest.approx(0.4 / 8)
    assert (result.slope_x, result.fixed) == pytest.approx((0.1, 0.2))
    assert found(samples).slope_y == 0.0
    always = [at(x, 4, 0.1 * x + 0.2) for x in (1, 2)]
    assert found(always, usual_y=8).slope_y == pytest.approx(0.05)
    assert found(EXACT, usual_y=8).slope_y == pytest.approx(0.2), "what was seen stays"
    newer = [*samples[:2], at(3, 0, 0.5, time=10.0)]
    weighted = (0.5 * 0.3 + 0.5 * 0.4 + 0.5) / 2
    assert found(newer, 10.0, half_life=10.0, usual_y=8).slope_y == pytest.approx(weighted / 8)


def test_no_slope_is_below_nothing() -> None:
    result = found([at(x, 0, 1.0 / x) for x in (1, 2, 4)])
    assert result.slope_x == 0.0
    assert result.fixed == pytest.approx(1.75 / 3)


# ------------------------------------------------------------ outliers


def test_outliers_go_and_are_not_counted() -> None:
    rng = np.random.default_rng(1)
    samples = [
        at(x, y, (0.1 * x + 0.2 * y + 0.3) * rng.normal(1.0, 0.01))
        for x in (1, 2, 3, 4) for y in (0, 2) for _ in range(5)
    ]  # fmt: skip
    clean = found(samples)
    wild = found([*samples, at(2, 0, 9.0), at(3, 2, 0.01)])
    assert wild.samples <= 40
    assert wild.slope_x == pytest.approx(clean.slope_x, rel=0.05)
    assert wild.slope_y == pytest.approx(clean.slope_y, rel=0.05)
    assert wild.error < 0.02


@pytest.mark.parametrize(
    ("off", "kept"), [(0.125, 101), (0.132, 100), (-0.125, 101), (-0.132, 100)]
)
def test_four_deviations_from_the_middle_are_kept(off: float, kept: int) -> None:
    """The middle is the outlier's side, 0.01; half lie 0.02 from it: four deviations are 0.119."""
    rows = [at(1, 0, 1.0 + d) for d in [-0.01, 0.01] * 50]
    assert found([*rows, at(1, 0, 1.0 + off)]).samples == kept


def test_equal_samples_have_no_outliers() -> None:
    assert found([at(1, 0, 1.0)] * 9).samples == 9


# ------------------------------------------------------------ windows


def test_a_cell_keeps_its_newest_and_cells_have_a_number() -> None:
    window = Window(a_cell=2, cells=2)
    for time, x in enumerate((1, 1, 1, 2)):
        window.add(at(x, 0, 1.0, time=float(time)))
    assert sorted((s.x, s.time) for s in window.samples()) == [(1, 1.0), (1, 2.0), (2, 3.0)]
    assert len(window) == 3
    window.add(at(1, 0, 1.0, time=4.0))
    window.add(at(1, 5, 1.0, time=5.0))
    assert sorted((s.x, s.y) for s in window.samples()) == [(1, 0), (1, 0), (1, 5)], "2 was oldest"
    assert window.has(5)
    assert window.has(0)
    assert not window.has(1)


def test_the_usual_window() -> None:
    window = Window()
    for n in range(70):
        window.add(at(1, 0, 1.0, time=float(n)))
    assert len(window) == 64
    for n in range(300):
        window.add(at(n + 2, 0, 1.0, time=100.0 + n))
    assert len(window) == 256
    old, new = at(1, 0, 1.0, time=0.0), at(1, 0, 4.0, time=600.0)
    both = Window()
    for each in (old, new, old, new):
        both.add(each)
    result = both.fit(600.0)
    assert result is not None
    assert result.slope_x == pytest.approx((0.5 + 4) / 1.5)


def test_a_window_passes_on_its_half_life_the_others_and_the_usual_training() -> None:
    mine, other = Window(half_life=10.0), Window(half_life=99.0)
    for _ in range(2):
        mine.add(at(1, 0, 0.3, time=0.0))
        other.add(at(1, 0, 0.9, time=10.0))
    result = mine.fit(10.0, [other], usual_y=4)
    assert result is not None
    mean = (0.5 * 0.3 + 0.9) / 1.5
    assert result.slope_x == pytest.approx(mean)
    assert result.slope_y == pytest.approx(mean / 4)
    assert result.samples == 4
    assert Window().fit(0.0) is None


# ------------------------------------------------------------ the model


def plane(slope_x: float, slope_y: float, fixed: float) -> Plane:
    return Plane(
        slope_x=slope_x, slope_y=slope_y, fixed=fixed, r2=1.0, r2_single=1.0, error=0.0,
        samples=1, observed_x=True, observed_y=True,
    )  # fmt: skip


def test_a_model_is_made_of_the_planes_that_are_known() -> None:
    decode, prefill, train = plane(1.0, 2.0, 3.0), plane(4.0, 5.0, 6.0), plane(7.0, 8.0, 9.0)
    model = latency_model(decode, prefill, train)
    assert model is not None
    assert (model.alpha1, model.alpha2, model.alpha0) == (1.0, 2.0, 3.0)
    assert (model.pi1, model.pi2, model.pi0) == (4.0, 5.0, 6.0)
    assert (model.gamma1, model.gamma2, model.gamma0) == (7.0, 8.0, 9.0)
    bare = latency_model(decode, None, None)
    assert bare is not None
    assert (bare.alpha0, bare.pi0, bare.pi1, bare.gamma0) == (3.0, 0.0, 0.0, 0.0)
    assert latency_model(None, prefill, train) is None
