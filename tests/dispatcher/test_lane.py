"""A replica as the pacing policy foresees it, worked out by hand."""

from __future__ import annotations

import math

import pytest

from services.dispatcher.policies.base import StepSeen
from services.dispatcher.policies.parts.lane import QUALITY_LEAST, Lane
from services.dispatcher.policies.parts.round import Round
from services.dispatcher.policies.parts.waiting import Waiting
from shared.latency import LatencyModel
from tests.dispatcher.made import request, view

MODEL = LatencyModel(alpha0=0.02, alpha1=0.01, alpha2=0.05, pi0=0.1, pi1=0.001, pi2=0.2)


def lane(**changes: object) -> Lane:
    made = Lane(view(**changes))
    made.tell(made.view, MODEL)
    return made


def w(key: str = "q", output: float = 10.0, **more: object) -> Waiting:
    """0.2 s of prompt, 10 tokens."""
    return Waiting(request(key, **more), output, 1.0, 9.0, 0.0)


def test_training_beside_it_is_part_of_the_fixed_times() -> None:
    made = lane(B=2, quality=0.0, kv_total=500, context=90)
    assert (made.alpha0, made.alpha1, made.pi0, made.pi1) == pytest.approx((0.12, 0.01, 0.5, 0.001))
    assert (made.B, made.quality) == (2, QUALITY_LEAST)
    assert (made.kv_total, made.context) == (500, 90)
    made.tell(view(quality=3.0), None)
    assert (made.alpha0, made.latency, made.B, made.quality) == (pytest.approx(0.12), None, 0, 3.0)
    assert (made.kv_total, made.context) == (math.inf, math.inf), "0: not known"


def test_before_anything_is_told_nothing_is_expected() -> None:
    made = Lane(view())
    assert (made.alpha0, made.alpha1, made.pi0, made.pi1) == (0.0, 0.0, 0.0, 0.0)
    assert (made.quality, made.bias, made.kv, made.background, made.rank) == (1.0, 1.0, 0, 0, 0)
    assert (made.slack, made.prefill_end, made.delay, made.B, made.kind) == (math.inf, 0, 0, 0, 0)
    assert (made.kv_total, made.context) == (math.inf, math.inf)


def test_an_empty_replica_begins_at_once() -> None:
    first, end, delay = lane().predict(w(), 5.0)
    assert first == pytest.approx(5.0 + 0.2)
    assert end == pytest.approx(5.2 + 10 * 0.03)
    assert delay == pytest.approx(0.2 + 10 * 0.01)


def test_a_long_prompt_takes_several_steps() -> None:
    first, _, delay = lane().predict(w(prompt_tokens=1000), 0.0)
    assert first == pytest.approx(1.0 + 2 * 0.1)
    assert delay == pytest.approx(1.2 + 0.1)


def test_beside_others_it_waits_for_their_prompts_and_shares_their_steps() -> None:
    made = lane()
    assert made.release(w("a"), 0.0) == pytest.approx(0.5)
    assert made.prefill_end == pytest.approx(0.2)
    first, end, delay = made.predict(w("b"), 0.1)
    assert first == pytest.approx(0.2 + 0.2 + 0.04), "after a's prompt, one step of both"
    assert end == pytest.approx(0.44 + 10 * 0.04)
    assert delay == pytest.approx(0.3)
    assert made.predict(w("b"), 0.7)[0] == pytest.approx(0.7 + 0.2 + 0.04)
    assert made.predict(w("b", prompt_tokens=600), 0.7)[0] == pytest.approx(0.7 + 0.8 + 2 * 0.04)


def test_the_bias_scales_every_part() -> None:
    made = lane()
    made.release(w("a"), 0.0)
    made.bias = 2.0
    first, end, delay = made.predict(w("b"), 1.0)
    assert first == pytest.approx(1.0 + 0.4 + 0.08)
    assert end == pytest.approx(1.48 + 0.8)
    assert delay == pytest.approx(0.6)


def test_memory_and_context_must_hold_it_to_the_last_token() -> None:
    made = lane(kv_total=220, context=110)
    assert made.room(110)
    assert not made.room(111)
    made.release(w("a"), 0.0)
    assert made.kv == 110
    assert made.room(110)
    made.release(w("b"), 0.0)
    assert not made.room(1)


def test_the_slack_is_that_of_the_tightest_in_flight() -> None:
    made = lane()
    made.release(w("loose"), 0.0)
    assert made.slack == math.inf
    made.release(w("tight", deadline=2.0), 0.0)
    # first 0.2 + 0.2 + 0.04, end 0.44 + 0.4
    assert made.slack == pytest.approx(2.0 - 0.84)
    assert made.delay == pytest.approx(0.6)
    made.release(w("later"), 0.0)
    assert made.slack == pytest.approx(2.0 - 0.84 - 0.3)
    made.release(w("tighter", output=1.0, deadline=2.0), 0.0)
    first = 0.44 + (0.2 + 0.05) + (0.2 + 0.06)
    assert made.prefill_end == pytest.approx(first)
    assert made.slack == pytest.approx(2.0 - 0.84 - 0.3 - 0.21)
    made.leave("tight", 3.0, learn=False)
    assert made.slack == pytest.approx(2.0 - (first + 0.06))


def test_a_share_of_its_time_is_kept_back() -> None:
    made = lane()
    made.release(w(deadline=3.0), 1.0, safety=0.5)
    assert made.slack == pytest.approx(3.0 - 1.5 - 0.5 * 0.5)
    tight = lane()
    tight.release(w(deadline=0.6), 0.0, safety=0.5)
    assert tight.slack == 0.0, "never below nothing"


def test_one_that_is_late_anyway_holds_up_nobody() -> None:
    made = lane()
    made.release(w(deadline=0.4), 0.0)
    assert made.slack == math.inf
    exact = lane()
    end = exact.predict(w(), 0.0)[1]
    exact.release(w(deadline=end), 0.0)
    assert exact.slack == 0.0, "one that ends when it is due is not late"
    exact.release(w("more"), 0.0)
    assert exact.slack == math.inf, "now it is"


def test_hopeless_requests_are_counted() -> None:
    made = lane()
    late = w("late")
    late.late = True
    made.release(late, 0.0)
    made.release(w("fine"), 0.0)
    assert made.background == 1
    made.leave("fine", 1.0, learn=False)
    assert made.background == 1
    made.leave("late", 1.0, learn=False)
    assert made.background == 0


def test_an_empty_replica_starts_anew() -> None:
    made = lane()
    made.release(w("a"), 0.0)
    made.release(w("b", deadline=9.0), 0.0)
    assert made.leave("nobody", 0.1, learn=True) is None
    running = made.leave("a", 0.1, learn=False)
    assert running is not None
    assert running.waiting.request.id == "a"
    assert (made.kv, made.prefill_end) == (110, pytest.approx(0.44))
    assert made.delay == pytest.approx(0.6)
    made.leave("b", 0.3, learn=False)
    assert (made.kv, made.prefill_end, made.delay, made.slack) == (0, 0.3, 0.0, math.inf)
    made.release(w("c"), 0.4)
    made.leave("c", 5.0, learn=False)
    assert made.prefill_end == pytest.approx(0.6), "in the past it stays"


@pytest.mark.parametrize(
    ("took", "bias"),
    [(0.5, 1.0), (0.75, 1.05), (5.0, 1.1), (0.25, 0.95), (0.01, 0.95), (0.45, 0.99)],
)
def test_actual_times_correct_the_prediction_a_tenth_each(took: float, bias: float) -> None:
    """Predicted: 0.5 s. A ratio beyond 2 or below a half counts as that."""
    made = lane()
    made.release(w(), 1.0)
    made.leave("q", 1.0 + took, learn=True)
    assert made.bias == pytest.approx(bias)
    other = lane()
    other.release(w(), 1.0)
    other.leave("q", 1.0 + took, learn=False)
    assert other.bias == 1.0


def test_the_bias_has_bounds() -> None:
    made = lane()
    made.bias = 2.99
    made.release(w(), 0.0)
    made.leave("q", 99.0, learn=True)
    assert made.bias == 3.0
    made.bias = 0.335
    made.release(w(), 200.0)
    made.leave("q", 200.001, learn=True)
    assert made.bias == 0.33


def test_one_that_was_delayed_much_says_nothing_of_speed() -> None:
    made = lane()
    made.release(w("a"), 0.0)
    made.release(w("b"), 0.0)  # delays a by 0.3, of then 0.8 s
    made.leave("a", 3.0, learn=True)
    assert made.bias == 1.0
    made.leave("b", 1.68, learn=True)  # predicted 0.84 and not delayed
    assert made.bias == pytest.approx(1.1)
    little = lane()
    little.release(w("a", output=100.0), 0.0)  # 3.2 s
    little.release(w("b", output=0.0, prompt_tokens=1), 0.0)  # delays it by 0.101
    little.leave("a", 2 * (3.2 + 0.101), learn=True)
    assert little.bias == pytest.approx(1.1), "what delayed it is part of the prediction"


def test_without_a_model_nothing_is_learnt() -> None:
    made = Lane(view())
    made.release(w(), 0.0)
    made.leave("q", 5.0, learn=True)
    assert made.bias == 1.0


# ------------------------------------------------------------ a decision's releases


def test_a_round_gathers_a_batch_a_replica_with_its_numbers() -> None:
    made, other = lane(b_limit=5, B=3), lane(id="other")
    made.bias = 1.23456
    made.release(w("a"), 2.0)
    made.release(w("b"), 2.0)
    found = Round(2.0)
    a, b = w("a", arrival=0.5), w("b", arrival=0.25)
    a.arrived, b.arrived = 1.0, 1.5
    found.add(made, a, 2.51234567, 0.12345678, "slack")
    found.add(other, w("c"), 3.0, 1.0, "left over")
    found.add(made, b, 2.75, -0.5, "hopeless")
    first, second = found.releases()
    assert (first.replica, first.requests) == ("r", ("a", "b"))  # type: ignore[union-attr]
    assert first.why == {  # type: ignore[union-attr]
        "in_flight": 2, "b_limit": 5, "B": 3, "bias": 1.235, "order": "slack",
        "predicted:a": 0.5123, "slack:a": 0.1235, "underway:a": 0.5, "waited:a": 1.0,
        "order:a": "slack",
        "predicted:b": 0.75, "slack:b": -0.5, "underway:b": 1.25, "waited:b": 0.5,
        "order:b": "hopeless",
    }  # fmt: skip
    assert (second.replica, second.requests) == ("other", ("c",))  # type: ignore[union-attr]


def test_every_number_of_a_round_is_rounded_to_a_tenth_of_a_millisecond() -> None:
    found = Round(1.00001)
    a = w("a", arrival=0.00002)
    a.arrived = 0.50007
    found.add(lane(), a, 2.0, 0.0, "slack")
    (release,) = found.releases()
    numbers = release.why  # type: ignore[union-attr]
    assert (numbers["predicted:a"], numbers["underway:a"], numbers["waited:a"]) == (
        1.0,
        0.5,
        0.4999,
    )


def step(seconds: float, *, steps: int = 10, b: int = 1, prefill: int = 0) -> StepSeen:
    return StepSeen(
        replica="r0", seconds=seconds, steps=steps, b=b, B=0, prefill_tokens=prefill,
        decode_tokens=steps * b,
    )  # fmt: skip


def test_steps_as_predicted_change_nothing() -> None:
    made = lane()
    made.release(w(deadline=9.0), 0.0)
    slack = made.slack
    for _ in range(20):
        made.saw(step(0.3), 1.0)  # ten steps of 30 ms
        made.saw(step(0.32), 1.0)
        made.saw(step(0.31 + 0.1 + 0.5, steps=10, prefill=500), 1.0)
    assert (made.pace, made.slack, made.delay) == (1.0, slack, pytest.approx(0.3))


def test_slow_steps_are_felt_by_who_comes_and_by_who_is_there() -> None:
    made = lane()
    made.release(w(deadline=9.0), 0.0)
    slack, prefill_end = made.slack, made.prefill_end
    for _ in range(4):
        made.saw(step(0.6), 0.1)  # ten steps of 60 ms
    assert 1.9 < made.speed == made.pace < 2.0
    assert made.slack == pytest.approx(slack - 4 * 0.3), "what four reports took too long"
    assert made.prefill_end == pytest.approx(prefill_end + 4 * 0.3), "its prompt is not through"
    first, end, _ = made.predict(w(), 20.0)
    assert end - first == pytest.approx(10 * 0.04 * made.pace)
    # Who is released now is predicted at that pace, so such steps take nothing more from it.
    fresh = lane()
    fresh.pace = fresh.speed = 2.0
    fresh.release(w(deadline=9.0), 0.0)
    before = fresh.slack
    fresh.saw(step(0.6), 1.0)
    assert fresh.slack == pytest.approx(before)


def test_fast_steps_give_slack_back_and_the_usual_speed_ends_it() -> None:
    made = lane()
    made.release(w(deadline=9.0), 0.0)
    slack = made.slack
    for _ in range(20):
        made.saw(step(0.15), 1.0)
    assert made.pace == pytest.approx(0.5, abs=0.03)
    assert made.slack > slack
    for _ in range(20):
        made.saw(step(0.3), 1.0)
    assert made.pace == 1.0


def test_one_report_tells_no_more_than_four_times() -> None:
    made = lane()
    made.saw(step(30.0), 0.0)
    assert made.pace == 4.0
    made.saw(step(0.0), 0.0)
    made.saw(step(5.0, steps=0), 0.0)
    assert made.pace == 4.0, "reports of nothing"
