"""The latency model worked out by hand, and batch sizes at the edges of what a SLO can name."""

from __future__ import annotations

import math

import pytest

from shared.latency import LatencyModel

MODEL = LatencyModel(
    alpha1=0.002, alpha2=0.01, alpha0=0.03,
    pi1=1e-4, pi2=0.005, pi0=0.02,
    gamma1=0.1, gamma2=0.01, gamma0=0.2,
)  # fmt: skip


def b_star(budget: float, B: float = 2, b_max: int = 64, **limits: float) -> int:
    """For requests of 100 and 10 tokens: beside B = 2 they take 0.53 s and 0.03 s a request."""
    return MODEL.b_star(budget, B, 100, 10, b_max=b_max, **limits)


def test_each_line_of_the_model_by_hand() -> None:
    assert MODEL.t_infer(3, 2) == pytest.approx(0.006 + 0.02 + 0.03)
    assert MODEL.t_infer(3) == pytest.approx(0.006 + 0.03), "no training unless it is named"
    assert MODEL.t_prefill(100, 2) == pytest.approx(0.01 + 0.01 + 0.02)
    assert MODEL.t_prefill(100) == pytest.approx(0.01 + 0.02)
    assert MODEL.t_train(3, 2) == pytest.approx(0.2 + 0.03 + 0.2)


def test_training_may_slow_every_request_and_no_more_beyond_a_size() -> None:
    model = LatencyModel(alpha1=0.002, alpha2=0.01, alpha0=0.03, alpha3=0.004, flat=4)
    assert model.infer_slope(3) == pytest.approx(0.002 + 0.012)
    assert model.infer_fixed(3) == pytest.approx(0.03 + 0.03)
    assert model.t_infer(5, 3) == pytest.approx(5 * 0.014 + 0.06)
    assert model.t_infer(5, 4) == pytest.approx(5 * 0.018 + 0.07)
    assert model.t_infer(5, 9) == model.t_infer(5, 4), "it takes no more cores"
    assert LatencyModel(alpha2=0.01).t_infer(0, 9) == pytest.approx(0.09), "no end unless named"
    assert LatencyModel(alpha2=0.01, flat=0.5).t_infer(0, 9) == pytest.approx(0.005)
    # prompts play no part; ten tokens of 0.014 s a request beside 0.6 s
    assert model.b_star(0.6 + 3 * 0.14, 3, 0, 10, b_max=64) == 3
    assert model.b_star(9.0, 3, 0, 10, b_max=64, tpot=0.06 + 2 * 0.014) == 2


def test_a_request_takes_the_prompts_beside_it_and_its_own_tokens() -> None:
    seconds = (300 * 1e-4 + 0.01 + 0.02) + 10 * 0.056
    assert MODEL.service(3, 2, 100, 10) == pytest.approx(seconds)
    assert MODEL.rate(3, 2, 100, 10) == pytest.approx(3 / seconds)


def test_what_takes_no_time_has_no_bound_on_its_rate() -> None:
    assert LatencyModel().rate(3, 2, 100, 10) == math.inf


def test_a_coefficient_that_is_not_named_is_nothing() -> None:
    empty = LatencyModel()
    assert (empty.t_infer(5, 5), empty.t_prefill(5, 5), empty.t_train(5, 5)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [(0.53 + 5 * 0.03, 5), (0.53 + 5 * 0.03 - 1e-6, 4), (0.53 + 0.03, 1), (1e3, 64)],
)
def test_the_batch_is_the_largest_within_the_budget(budget: float, wanted: int) -> None:
    assert b_star(budget) == wanted


def test_the_batch_is_bounded_by_memory_and_by_the_pace_of_tokens() -> None:
    assert b_star(0.68, b_max=3) == 3
    assert b_star(0.68, tpot=0.056) == 3, "0.05 s beside B = 2, and 0.002 s for each request"
    assert b_star(0.68, tpot=1.0) == 5
    assert b_star(0.68, b_max=6, tpot=1.0) == 5


def test_one_request_is_served_where_it_keeps_its_limit_without_training() -> None:
    """Alone it takes 0.35 s; beside B = 2 it does not fit into any of these budgets."""
    assert b_star(0.36) == 1
    assert b_star(0.34) == 0
    assert b_star(0.34, slo=0.36) == 1
    assert b_star(0.36, slo=0.34) == 0
    assert b_star(10.0, tpot=0.04, slo=0.36) == 1, "what no batch keeps pace with runs alone"
    assert b_star(10.0, tpot=0.04, slo=0.34) == 0


def test_a_batch_of_one_within_the_budget_needs_no_second_look() -> None:
    assert b_star(0.565, slo=0.1) == 1


def test_no_room_and_no_slope() -> None:
    assert LatencyModel().b_star(0.0, 0, 100, 10, b_max=7) == 7
    assert LatencyModel(alpha0=1.0).b_star(10.0, 0, 100, 10, b_max=7) == 7
    exact = LatencyModel(alpha1=1.0)
    assert exact.b_star(40.0, 0, 0, 10, b_max=7) == 4
    assert exact.b_star(70.0, 0, 0, 10, b_max=7) == 7
    assert exact.b_star(0.0, 0, 0, 10, b_max=7) == 0


def test_a_quotient_a_hair_below_a_whole_number_counts_as_whole() -> None:
    """0.3 / 0.1 is 2.9999999999999996 in binary."""
    assert LatencyModel(alpha1=0.1).b_star(0.3, 0, 0, 1, b_max=7) == 3


def test_without_an_end_to_end_limit_only_the_token_pace_bounds_the_batch() -> None:
    """An infinite budget used to end in an OverflowError."""
    model = LatencyModel(alpha0=0.01, alpha1=0.001, pi1=0.0001)
    assert model.b_star(math.inf, 0, 100, 50, b_max=64) == 64
    assert model.b_star(math.inf, 0, 100, 50, b_max=64, tpot=0.02) == 10


def test_a_vanishing_slope_leaves_the_largest_batch() -> None:
    assert LatencyModel(alpha1=1e-320).b_star(1e9, 0, 0, 1, b_max=7) == 7


def test_training_may_slow_every_request_and_need_not_slow_more_with_its_batch() -> None:
    model = LatencyModel(alpha1=0.002, alpha2=0.01, alpha0=0.03, alpha3=0.001, flat=2.0)
    assert model.t_infer(4, 1) == pytest.approx(0.03 + 0.01 + 4 * 0.003)
    assert model.t_infer(4, 2) == model.t_infer(4, 16) == pytest.approx(0.03 + 0.02 + 4 * 0.004)
    assert model.b_star(10 * (0.05 + 5 * 0.004), 8, 0, 10, b_max=64) == 5
    assert model.b_star(10.0, 8, 0, 10, b_max=64, tpot=0.05 + 3 * 0.004) == 3
