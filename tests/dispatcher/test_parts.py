"""The building blocks of the pacing policy, each alone."""

from __future__ import annotations

import random

import pytest

from services.dispatcher.policies.base import Completion, ReplicaView, Request, StepSeen
from services.dispatcher.policies.parts.fit import StepFit
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.lengths import KNOWN, Lengths
from services.dispatcher.policies.parts.path import PathLag
from services.dispatcher.policies.parts.plan import keep_feasible
from services.dispatcher.policies.parts.rates import FLOOR, ArrivalRate
from services.dispatcher.policies.parts.share import TokenShares
from services.dispatcher.policies.parts.waiting import MAIN, Waiting
from shared.latency import LatencyModel

TRUE = LatencyModel(alpha0=0.004, alpha1=3e-5, alpha2=2e-4, pi0=0.001, pi1=1.1e-4)


def _request(key: str = "q", **changes: object) -> Request:
    values: dict[str, object] = {
        "id": key,
        "arrival": 0.0,
        "prompt_tokens": 500,
        "max_tokens": 100,
        "deadline": 10.0,
    }
    return Request(**(values | changes))  # type: ignore[arg-type]


def _done(tokens: int, reason: str = "stop") -> Completion:
    return Completion(id="q", replica="r", output_tokens=tokens, reason=reason)


def test_output_length_is_a_prior_until_fifty_are_known_then_a_quantile() -> None:
    lengths = Lengths(prior=40.0, quantile=0.8)
    request = _request(max_tokens=1000)
    assert lengths.expect(request) == 1000, "a limit is believed until answers end by themselves"
    for k in range(KNOWN):
        assert not lengths.known
        lengths.learn(request, _done(1 + k % 10))
    assert lengths.known
    assert lengths.expect(request) == pytest.approx(9, abs=1)
    assert lengths.expect(_request(max_tokens=3)) == 3, "never above the limit"


def test_output_length_is_the_limit_where_answers_run_to_it() -> None:
    lengths = Lengths()
    for _ in range(100):
        lengths.learn(_request(), _done(20, "length"))
    assert lengths.expect(_request(max_tokens=77)) == 77


def test_what_was_cancelled_or_lost_teaches_nothing_about_lengths() -> None:
    lengths = Lengths()
    for _ in range(100):
        lengths.learn(_request(), _done(1, "cancelled"))
        lengths.learn(_request(), _done(0, "lost"))
    assert not lengths.known


def test_step_fit_finds_the_coefficients_behind_noisy_reports() -> None:
    rng, fit = random.Random(1), StepFit()
    assert fit.model("r") is None
    for _ in range(400):
        b, B, steps = rng.randint(1, 30), rng.choice([0, 4, 8]), rng.randint(1, 10)
        prefill = rng.choice([0, 0, 512])
        exact = steps * TRUE.t_infer(b, B)
        if prefill:
            steps = 1
            exact = TRUE.t_infer(b, B) + TRUE.t_prefill(prefill)
        fit.learn(
            StepSeen(
                replica="r",
                seconds=exact * rng.lognormvariate(0, 0.03),
                steps=steps,
                b=b,
                B=B,
                prefill_tokens=prefill,
                decode_tokens=b * steps,
            )
        )
    model = fit.model("r")
    assert model is not None
    for b, B in ((1, 0), (16, 0), (16, 8)):
        assert model.t_infer(b, B) == pytest.approx(TRUE.t_infer(b, B), rel=0.1)
    assert model.t_prefill(512) == pytest.approx(TRUE.t_prefill(512), rel=0.1)
    assert fit.model("another") is not None, "a new replica starts from what all of them showed"


def test_a_lane_foresees_what_a_release_costs_itself_and_the_others() -> None:
    lane = Lane(ReplicaView(id="r", dispatchable=True, b_limit=8, b_max=8))
    lane.tell(lane.view, TRUE)
    first = Waiting(_request("a", deadline=1.0), 100.0, 0.1, 0.5, 0.0)
    end = lane.release(first, 0.0)
    assert end == pytest.approx(TRUE.t_prefill(500) + 100 * TRUE.t_infer(1), rel=1e-6)
    assert lane.slack == pytest.approx(1.0 - end)
    second = Waiting(_request("b"), 10.0, 0.1, 9.0, 0.0)
    _, _, delay = lane.predict(second, 0.0)
    assert delay >= TRUE.t_prefill(500)
    lane.release(second, 0.0)
    assert lane.slack == pytest.approx(1.0 - end - delay)
    lane.leave("a", end + delay, learn=True)
    lane.leave("b", end + delay, learn=True)
    assert lane.slack == float("inf")
    assert lane.kv == 0


def test_the_plan_gives_up_what_brings_fewest_tokens_a_second() -> None:
    entries = []
    for number, output in enumerate((100, 5, 100, 100)):
        w = Waiting(_request(f"q{number}"), output, 1.0, 2.0, 0.0)
        w.place = MAIN
        entries.append((w.latest, 0.0, number, w))
    kept, dropped = keep_feasible(entries, 0.0, 0.0, 1)
    assert [w.request.id for w in dropped] == ["q1"], "three of four can start within two seconds"
    assert len(kept) == 3
    assert keep_feasible(entries, 0.0, 0.0, 4)[1] == []
    assert keep_feasible(entries, 0.0, 0.0, 0) == ([], [])


def test_tenants_get_equal_shares_of_tokens() -> None:
    shares = TokenShares()
    shares.enter("busy")
    shares.enter("quiet")
    shares.charge("busy", 100, 100)
    assert shares.several
    assert shares.counter("quiet") < shares.counter("busy")
    shares.enter("late")
    assert shares.counter("late") == shares.counter("quiet"), "absence is not saved up"


def test_arrival_rate_has_a_floor_and_a_margin_for_bursts() -> None:
    rate = ArrivalRate()
    assert rate.expected == FLOOR
    for second in range(20):
        for _ in range(20 if second % 4 == 0 else 0):
            rate.arrived(0.1)
        rate.tick(float(second))
    assert rate.mean > 2
    assert rate.expected > 1.5 * rate.mean


def test_the_lag_of_the_path_is_the_median_of_recent_first_attempts() -> None:
    path = PathLag()
    assert path.seconds(0.0) == 0.0
    for k, lag in enumerate((0.002, 0.1, 0.08, 0.09, 0.3)):
        path.arrived(_request(f"q{k}", arrival=10.0 - lag), 10.0)
    for k in range(6):
        path.arrived(_request(f"again{k}", arrival=1.0, attempt=2), 10.0)
        path.arrived(_request(f"claimed{k}", arrival=1.0, fresh=False), 10.0)
    assert path.seconds(10.1) == pytest.approx(0.09)
    assert path.seconds(20.0) == 0.0, "what was long ago says nothing of now"
