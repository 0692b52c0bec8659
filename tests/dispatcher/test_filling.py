"""The batches of the first replicas are filled, and what may be delayed by how much."""

from __future__ import annotations

import math

import pytest

from services.dispatcher.policies.parts.choice import EASE
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.lengths import KNOWN, STREAMS_MAX, Lengths
from services.dispatcher.policies.parts.macro import STANDING, Macro
from services.dispatcher.policies.parts.waiting import Waiting
from shared.latency import LatencyModel
from tests.dispatcher.made import done, request
from tests.dispatcher.scene import MODEL, Scene, lane, occupy

# ------------------------------------------------------------ where a request goes


def test_a_request_with_room_to_spare_joins_the_first_replica() -> None:
    """Beside another: 0.24 s to its first token, 0.64 s to its end; it delays the other by 0.3."""
    for deadline, chosen in ((0.64 * (1 + EASE) + 0.01, "full"), (0.76, "empty")):
        full = lane("full")
        occupy(full)
        scene = Scene(full, lane("empty"))
        scene.wait(deadline=deadline)
        assert list(scene.serve()) == [chosen], f"due after {deadline} s"


def test_without_a_limit_or_outside_the_active_set_the_quickest_is_taken() -> None:
    full = lane("full")
    occupy(full)
    scene = Scene(full, lane("empty"))
    scene.wait()
    assert list(scene.serve()) == ["empty"], "nothing says how long it may take"
    full = lane("full")
    occupy(full)
    scene = Scene(full, lane("empty"), fill=False)
    scene.wait(deadline=5.0)
    assert list(scene.serve()) == ["empty"], "consolidate: false"


def test_those_in_flight_keep_room_to_spare() -> None:
    for slack, chosen in ((0.3 * (1 + EASE) + 0.01, "full"), (0.3 * (1 + EASE) - 0.01, "empty")):
        full = lane("full")
        full.release(Waiting(request("old", deadline=0.5 + slack), 10.0, 0.5, 9.0, 0.0), 0.0)
        full.prefill_end = 0.0
        scene = Scene(full, lane("empty"))
        scene.wait(deadline=5.0)
        assert list(scene.serve()) == [chosen], f"slack {slack}"


def test_an_answer_that_may_become_long_is_not_put_beside_others() -> None:
    for most, chosen in ((10.0, "full"), (20.0, "full"), (40.0, "empty")):
        full = lane("full")
        occupy(full)
        scene = Scene(full, lane("empty"))
        scene.wait(deadline=1.4, bounds=(1.0, most))  # 0.04 s more for each token
        assert list(scene.serve()) == [chosen], f"up to {most} tokens"


def test_a_replica_without_the_adapter_or_without_a_model_is_not_filled() -> None:
    full = lane("full", adapters={})
    scene = Scene(full, lane("holds", adapters={"x": "1"}))
    scene.wait(deadline=5.0, adapter="x")
    assert list(scene.serve()) == ["holds"]
    unknown = lane("unknown", model=None, b_limit=4)
    occupy(unknown)
    scene = Scene(unknown, lane("new", model=None, b_limit=4))
    scene.wait(deadline=5.0)
    assert list(scene.serve()) == ["new"]


# ------------------------------------------------------------ a steady order


def _order(macro: Macro, lanes: list[Lane], speeds: list[float]) -> list[str]:
    for each, speed in zip(lanes, speeds, strict=True):
        model = LatencyModel(alpha0=MODEL.alpha0 / speed, pi1=MODEL.pi1 / speed)
        each.tell(each.view, model)
        macro.told(each)
    macro._rank(1.0)
    return [each.view.id for each in macro.order]


def test_noise_of_the_coefficients_moves_no_replica_and_a_real_change_does() -> None:
    macro, lanes = Macro(0.2), [lane("a"), lane("b"), lane("c")]
    assert _order(macro, lanes, [1.0, 1.0, 1.0]) == ["a", "b", "c"]
    assert _order(macro, lanes, [0.95, 1.05, 1.0]) == ["a", "b", "c"]
    assert _order(macro, lanes, [0.5, 0.5, 0.5]) == ["a", "b", "c"], "all alike"
    assert _order(macro, lanes, [0.5, 0.5, 0.5 * (1 + 3 * STANDING)]) == ["c", "a", "b"]


# ------------------------------------------------------------ limits on the pace


def _paced(least: float) -> Lane:
    """100 tokens expected at 0.03 s each, 0.1 s allowed; the first comes at 0.2 s."""
    made = lane("r")
    w = Waiting(request("q", tpot=0.1, max_tokens=100), 100.0, 1.0, 9.0, 0.0, (least, 100.0))
    made.release(w, 0.0)
    return made


def test_an_answer_that_may_be_short_can_be_delayed_little_at_first() -> None:
    sure = _paced(100.0)
    assert sure.slack == pytest.approx(99 * (0.1 - 0.03))
    made = _paced(11.0)
    assert made.slack == pytest.approx(10 * (0.1 - 0.03))
    made.renew(0.2 + 50 * 0.03)
    assert made.slack == pytest.approx(50 * (0.1 - 0.03)), "50 tokens came early"
    made.renew(0.2 + 99.9 * 0.03)
    assert made.slack == pytest.approx(99 * (0.1 - 0.03)), "never beyond what is expected"


def test_a_prompt_that_is_let_in_uses_up_what_was_gained() -> None:
    made = _paced(11.0)
    made.renew(1.7)
    before = made.slack
    # From the 50th token on it is delayed by 0.3 s, and after that it gains again.
    made.release(Waiting(request("b"), 10.0, 1.0, 9.0, 0.0), 1.7)
    made.renew(2.0)
    assert made.slack == pytest.approx(before - 0.3)
    made.renew(2.3)
    assert made.slack == pytest.approx(before - 0.3 + 0.3 / 0.03 * 0.07)


def test_a_scene_opens_again_when_its_members_have_gained() -> None:
    made = _paced(2.0)
    scene = Scene(made)
    scene.macro.least_delay = 0.5
    made.prefill_end = 0.0
    assert scene.placement.open(0.2) is False
    assert scene.placement.open(1.7) is True


# ------------------------------------------------------------ lengths


def _learn(lengths: Lengths, tokens: int, count: int = KNOWN, **limits: float) -> None:
    for k in range(count):
        asked = request(f"q{k}", max_tokens=4000, **limits)
        lengths.learn(asked, done(f"q{k}", tokens=tokens))


def test_requests_with_other_limits_are_another_stream() -> None:
    lengths = Lengths(prior=40.0)
    _learn(lengths, 20, deadline=0.5)
    _learn(lengths, 300, ttft_deadline=1.0, tpot=0.05)
    assert lengths.expect(request(max_tokens=4000, deadline=0.5)) == 20
    assert lengths.expect(request(max_tokens=4000, deadline=0.55)) == 20, "about the same"
    assert lengths.expect(request(max_tokens=4000, ttft_deadline=1.0, tpot=0.05)) == 300
    assert lengths.expect(request(max_tokens=4000)) == 300, "as its adapter's so far"


def test_limits_of_all_kinds_do_not_fill_the_memory() -> None:
    lengths = Lengths()
    for exponent in range(3 * STREAMS_MAX):
        asked = request(deadline=2.0 ** (exponent / 20 - 10), tpot=2.0 ** (exponent % 23 - 10))
        lengths.learn(asked, done(tokens=7))
    assert len(lengths._streams) == STREAMS_MAX
    assert lengths.expect(request(max_tokens=50, deadline=1e9)) == 7


def test_the_forecast_has_bounds() -> None:
    lengths = Lengths(prior=40.0)
    assert lengths.forecast(request(max_tokens=1000)) == (4.0, 1000.0, 1000.0)
    for k in range(200):
        lengths.learn(request(), done(tokens=1 + k % 100))
    assert lengths.forecast(request(max_tokens=1000)) == (11.0, 81.0, 99.0)
    assert lengths.forecast(request(max_tokens=5)) == (5.0, 5.0, 5.0)
    forced = Lengths()
    for _ in range(KNOWN):
        forced.learn(request(), done(tokens=9, reason="length"))
    assert forced.forecast(request(max_tokens=77)) == (77.0, 77.0, 77.0)


def test_an_answer_shorter_than_expected_says_nothing_about_speed() -> None:
    made = lane("r")
    made.release(Waiting(request("q"), 100.0, 1.0, 9.0, 0.0), 0.0)
    made.leave("q", 0.2 + 10 * 0.03, learn=True, tokens=10)
    assert made.bias == pytest.approx(1.0)
    assert made.slack == math.inf
