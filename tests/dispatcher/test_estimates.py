"""What the pacing policy estimates, value by value: lengths, rates, the path, step times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.dispatcher.policies.base import StepSeen
from services.dispatcher.policies.parts.fit import FEW, NEEDED, StepFit
from services.dispatcher.policies.parts.lengths import KNOWN, REFRESH, WINDOW, Lengths
from services.dispatcher.policies.parts.path import REMEMBERED, PathLag
from services.dispatcher.policies.parts.path import WINDOW as PATH_WINDOW
from services.dispatcher.policies.parts.rates import FLOOR, ArrivalRate
from services.dispatcher.policies.parts.waiting import CHUNK
from shared.latency import LatencyModel
from tests.dispatcher.made import done, request

# ------------------------------------------------------------ lengths


def learn(lengths: Lengths, tokens: list[int], reason: str = "stop", **more: object) -> None:
    for count in tokens:
        lengths.learn(request(**more), done(tokens=count, reason=reason))


def expect(lengths: Lengths, limit: int = 1000, **more: object) -> float:
    return lengths.expect(request(max_tokens=limit, **more))


def test_the_prior_is_expected_as_soon_as_answers_end_by_themselves() -> None:
    lengths = Lengths(prior=40.0)
    learn(lengths, [7])
    assert (expect(lengths), expect(lengths, 30)) == (40.0, 30.0)
    assert Lengths()._prior == 128.0


def test_the_quantile_is_that_of_the_outputs_seen() -> None:
    lengths = Lengths(prior=40.0, quantile=0.5)
    learn(lengths, list(range(1, KNOWN)))
    assert not lengths.known
    assert (expect(lengths), lengths.mean()) == (40.0, 40.0)
    learn(lengths, [KNOWN])
    assert lengths.known
    assert expect(lengths) == KNOWN / 2 + 1
    assert expect(lengths, 3) == 3.0
    assert lengths.mean() == pytest.approx((KNOWN + 1) / 2)
    learn(lengths, [500] * (REFRESH - 1))
    assert expect(lengths) == KNOWN / 2 + 1, "between two refreshes it stays"
    learn(lengths, [500])
    assert expect(lengths) == 38, "the middle of 50 and 25 more"


def test_the_usual_quantile_is_four_fifths_and_the_largest_has_an_end() -> None:
    lengths = Lengths()
    learn(lengths, list(range(1, KNOWN + 1)))
    assert expect(lengths) == 41
    lengths = Lengths(quantile=1.0)
    learn(lengths, list(range(1, KNOWN + 1)))
    assert expect(lengths) == KNOWN


def test_only_recent_outputs_count() -> None:
    lengths = Lengths(quantile=0.0)
    learn(lengths, [1])
    learn(lengths, [9] * (WINDOW - 1))
    assert expect(lengths) == 1
    learn(lengths, [9] * REFRESH)
    assert expect(lengths) == 9


def test_an_adapter_has_lengths_of_its_own_once_it_has_shown_them() -> None:
    lengths = Lengths(quantile=0.5)
    learn(lengths, [10] * KNOWN)
    learn(lengths, [100] * (KNOWN - 1), adapter="x")
    assert expect(lengths, adapter="x") == 10, "as all so far, at their last refresh"
    learn(lengths, [100], adapter="x")
    assert expect(lengths, adapter="x") == 100
    assert expect(lengths) == 10
    assert expect(lengths, adapter="new") == 100, "the middle of all"


def test_answers_at_their_limit_decide_whether_the_limit_is_believed() -> None:
    lengths = Lengths(prior=40.0)
    for n in range(20):
        learn(lengths, [20], "length" if n % 4 else "stop")
    assert expect(lengths) == 40.0, "three of four"
    learn(lengths, [20] * 20, "length")
    assert expect(lengths) == 1000.0


def test_after_many_answers_a_new_one_weighs_a_fiftieth() -> None:
    lengths = Lengths()
    learn(lengths, [10] * KNOWN)
    learn(lengths, [60])
    assert lengths.mean() == pytest.approx(11.0)


def test_an_answer_of_nothing_or_one_that_failed_teaches_nothing() -> None:
    lengths = Lengths(prior=40.0)
    learn(lengths, [0] * KNOWN)
    learn(lengths, [5] * KNOWN, "failed")
    assert expect(lengths) == 1000.0
    learn(lengths, [1] * KNOWN)
    assert expect(lengths) == 1


# ------------------------------------------------------------ arrivals


def test_seconds_are_averaged_evenly_at_first_then_smoothed() -> None:
    rate = ArrivalRate()
    rate.arrived(9.0)
    rate.tick(0.0)  # begins the first bin; what came before it counts into it
    rate.arrived(1.0)
    rate.tick(0.4)
    assert rate.mean == 0.0, "half a second is the least that is looked at"
    rate.tick(1.0)
    assert (rate.mean, rate.work) == (2.0, 10.0)
    rate.tick(2.0)
    assert (rate.mean, rate.work) == (1.0, 5.0), "the second of two weighs a half"
    for second in range(3, 9):
        rate.tick(float(second))
    before, work = rate.mean, rate.work
    for _ in range(10):
        rate.arrived(0.5)
    rate.tick(9.0)
    assert rate.mean == pytest.approx(0.8 * before + 0.2 * 10)
    assert rate.work == pytest.approx(0.8 * work + 0.2 * 5)


def test_a_bin_of_several_seconds_weighs_as_many() -> None:
    rate = ArrivalRate()
    for second in range(11):
        rate.tick(float(second))
    for _ in range(8):
        rate.arrived(1.0)
    rate.tick(12.0)
    assert rate.mean == pytest.approx((1 - 0.8**2) * 4)
    rate.arrived(1.0)
    rate.tick(12.5)
    assert rate.mean == pytest.approx(0.8 * (1 - 0.8**2) * 4 + 0.2 * 2), "one of half a second: 1"


def test_the_margin_is_one_deviation_at_most_three_times_the_mean() -> None:
    rate = ArrivalRate()
    assert (rate.margin, rate.expected) == (1.0, FLOOR)
    rate.tick(0.0)
    for second, count in enumerate((4, 0), start=1):
        for _ in range(count):
            rate.arrived(0.0)
        rate.tick(float(second))
    assert rate.mean == 2.0
    assert rate.margin == pytest.approx(1.0 + math.sqrt(8 - 4) / 2)
    assert rate.expected == pytest.approx(4.0)
    rate.mean = 1e-3
    assert rate.margin == 3.0
    assert rate.expected == FLOOR
    rate.mean, rate._square = 2.0, 1.0
    assert rate.margin == 1.0, "rounding below the square of the mean"


# ------------------------------------------------------------ the path


def test_the_lag_is_seen_in_a_window_of_two_seconds_and_never_negative() -> None:
    path = PathLag()
    path.arrived(request(arrival=5.0), 4.0)
    assert path.seconds(4.0) == 0.0, "a clock ahead"
    path.arrived(request(arrival=3.9), 4.5)
    path.arrived(request(arrival=4.3), 4.5)
    assert path.seconds(4.5) == pytest.approx(0.2)
    assert path.seconds(4.0 + PATH_WINDOW) == pytest.approx(0.2), "still in the window"
    assert path.seconds(4.01 + PATH_WINDOW) == pytest.approx(0.6), "the upper of two"
    assert path.seconds(4.51 + PATH_WINDOW) == 0.0


def test_only_the_last_arrivals_are_remembered() -> None:
    path = PathLag()
    for _ in range(REMEMBERED):
        path.arrived(request(arrival=0.0), 1.0)
    for _ in range(REMEMBERED // 2 + 1):
        path.arrived(request(arrival=0.5), 1.0)
    assert path.seconds(1.0) == 0.5


# ------------------------------------------------------------ steps

TRUE = LatencyModel(alpha0=0.02, alpha1=0.001, alpha2=0.003, pi0=0.005, pi1=2e-4, pi2=0.003)


def seen(
    b: int = 1,
    B: int = 0,
    prefill: int = 0,
    steps: int = 1,
    replica: str = "r",
    factor: float = 1.0,
) -> StepSeen:
    """What a replica with the coefficients ``TRUE`` reports."""
    prompts = 0.0 if not prefill else min(float(steps), max(1.0, prefill / CHUNK))
    decoding = min(steps, b * steps)
    seconds = TRUE.alpha1 * b * steps + TRUE.alpha0 * decoding + TRUE.alpha2 * B * steps
    seconds += TRUE.pi1 * prefill + TRUE.pi0 * prompts
    return StepSeen(
        replica=replica, seconds=seconds * factor, steps=steps, b=b, B=B,
        prefill_tokens=prefill, decode_tokens=b * steps,
    )  # fmt: skip


REPORTS = [
    seen(b=b, B=B, prefill=prefill, steps=steps)
    for b in (0, 1, 4, 9)
    for B in (0, 4)
    for prefill in (0, 200, 512, 1500)
    for steps in (1, 4)
    if b or prefill
]


def test_exact_reports_give_the_exact_coefficients() -> None:
    fit = StepFit()
    for report in REPORTS * 3:
        fit.learn(report)
    model = fit.model("r")
    assert model is not None
    for name in LatencyModel.__struct_fields__:
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=2e-3, abs=1e-9), name
    pooled = fit.pooled()
    assert pooled is not None
    assert pooled.alpha0 == pytest.approx(TRUE.alpha0, rel=2e-3)


def test_nothing_is_said_before_there_are_two_reports_for_each_coefficient() -> None:
    fit = StepFit()
    for report in REPORTS[: int(NEEDED) - 1]:
        fit.learn(report)
    assert (fit.model("r"), fit.pooled(), fit.changed(9)) == (None, None, [])
    fit.learn(REPORTS[-1])
    assert fit.model("r") is not None
    assert fit.pooled() is not None
    assert fit.changed(9) == ["r"]


def test_a_fit_is_news_when_the_reports_have_doubled_while_they_are_few() -> None:
    fit = StepFit()
    for report in REPORTS[: int(NEEDED) - 1]:
        fit.learn(report)
        assert not fit.grown()
    fit.learn(REPORTS[-1])
    assert fit.grown()
    fit.pooled()
    for _ in range(int(NEEDED)):
        fit.learn(REPORTS[0])
        assert not fit.grown()
    fit.learn(REPORTS[0])
    assert fit.grown()
    fit.pooled()
    assert not fit.grown(), "said once: a decision that finds nothing new fits nothing"
    while fit._all.count < FEW:
        fit.learn(REPORTS[0])
    assert not fit.grown()


def test_reports_of_nothing_are_left_out() -> None:
    fit = StepFit()
    for _ in range(50):
        fit.learn(seen(factor=0.0))
        fit.learn(seen(b=0, steps=1, factor=5.0))
        fit.learn(seen(b=0, B=4))
        fit.learn(seen(factor=-1.0))
    assert fit.pooled() is None
    assert fit._own == {}


def test_a_replica_counts_mostly_for_itself_and_the_pool_is_for_the_new() -> None:
    fit = StepFit()
    for report in REPORTS * 3:
        fit.learn(report)
        fit.learn(seen(b=9, B=4, prefill=1500, steps=4, replica="slow", factor=3.0))
    for report in REPORTS * 3:
        own = {f: getattr(report, f) for f in StepSeen.__struct_fields__}
        fit.learn(StepSeen(**(own | {"replica": "slow", "seconds": 3 * report.seconds})))
    slow, quick, new = (fit.model(name) for name in ("slow", "r", "new"))
    assert slow is not None
    assert quick is not None
    assert new is not None
    step = [model.t_infer(4, 0) for model in (quick, new, slow)]
    assert step[0] == pytest.approx(TRUE.t_infer(4, 0), rel=0.25)
    assert step[2] == pytest.approx(3 * TRUE.t_infer(4, 0), rel=0.25)
    assert step[0] < step[1] < step[2]


def test_what_was_long_ago_is_forgotten() -> None:
    fit = StepFit()
    for report in REPORTS:
        fit.learn(report)
    for _ in range(60):
        for report in REPORTS:
            own = {f: getattr(report, f) for f in StepSeen.__struct_fields__}
            fit.learn(StepSeen(**(own | {"seconds": 2 * report.seconds})))
    model = fit.model("r")
    assert model is not None
    assert model.t_infer(4, 0) == pytest.approx(2 * TRUE.t_infer(4, 0), rel=0.02)


def test_the_pool_is_fitted_anew_when_it_has_doubled() -> None:
    fit = StepFit()
    for report in REPORTS:
        fit.learn(report)
    first = fit.pooled()
    for report in REPORTS:
        fit.learn(report)
    assert fit.pooled() is first
    fit.learn(REPORTS[0])
    assert fit.pooled() is not first


def test_replicas_are_named_once_after_their_reports_those_first_that_wait_longest() -> None:
    fit = StepFit()
    for name in ("a", "b", "c"):
        for report in REPORTS[:10]:
            own = {f: getattr(report, f) for f in StepSeen.__struct_fields__}
            fit.learn(StepSeen(**(own | {"replica": name})))
    assert fit.changed(2) == ["a", "b"]
    fit.learn(seen(replica="a"))
    fit.forget("c")
    assert fit.changed(2) == ["a"]
    assert fit.changed(2) == []
    assert sorted(fit._own) == ["a", "b"]
    fit.forget("nobody")


def test_coefficients_are_never_negative() -> None:
    fit, rng = StepFit(), np.random.default_rng(3)
    for _ in range(100):
        b = int(rng.integers(1, 9))
        fit.learn(
            StepSeen(
                replica="r", seconds=0.1 / b, steps=1, b=b, B=0, prefill_tokens=0, decode_tokens=b
            )
        )
    model = fit.model("r")
    assert model is not None
    assert (model.alpha1, model.alpha0 > 0) == (0.0, True), "the more at once, the faster?"
