"""Which replica a request goes to and when, worked out by hand."""

from __future__ import annotations

import math

import pytest

from services.dispatcher.policies.parts.choice import (
    LANES_TRIED,
)
from services.dispatcher.policies.parts.waiting import GONE, Waiting
from shared.latency import LatencyModel
from tests.dispatcher.made import request
from tests.dispatcher.scene import Scene, lane, occupy

# ------------------------------------------------------------ which replica


def test_the_quicker_replica_is_chosen_unless_the_other_is_that_much_better() -> None:
    slow = LatencyModel(alpha0=0.07, alpha1=0.01, pi0=0.1, pi1=0.001)  # 1.0 s instead of 0.5
    for quality, chosen in ((1.0, "quick"), (1.9, "quick"), (2.1, "slow")):
        scene = Scene(lane("slow", model=slow, quality=quality), lane("quick"))
        scene.wait()
        assert list(scene.serve()) == [chosen]


def test_the_delay_to_those_in_flight_is_part_of_the_expense() -> None:
    taken, slow = lane("busy"), lane("slow", model=LatencyModel(alpha0=0.06, alpha1=0.01, pi0=0.1))
    scene = Scene(taken, slow)
    occupy(taken)
    scene.wait()
    # busy: 0.2 + 0.04 + 0.4 and 0.3 to the other; slow: 0.8
    assert list(scene.serve()) == ["slow"]


def test_one_outside_the_active_set_is_taken_only_where_it_saves_much() -> None:
    slow = LatencyModel(alpha0=0.17, alpha1=0.01, pi0=0.1, pi1=0.001)  # 2.0 s instead of 0.5
    for deadline, chosen in ((14.0, "outside"), (16.0, "inside"), (None, "inside")):
        scene = Scene(lane("inside", model=slow), lane("outside"), active=1, fill=False)
        scene.wait(deadline=deadline)
        assert list(scene.serve()) == [chosen], f"a tenth of {deadline} s must be saved"
    scene = Scene(lane("inside", model=slow), lane("outside"), active=1)
    scene.wait(deadline=1.0)
    assert list(scene.serve()) == ["outside"], "nobody inside can do it"


def test_without_a_deadline_ten_seconds_must_be_saved_to_leave_the_active_set() -> None:
    for alpha0, chosen in ((1.0, "inside"), (1.1, "outside")):
        model = LatencyModel(alpha0=alpha0, alpha1=0.01, pi0=0.1, pi1=0.001)
        scene = Scene(lane("inside", model=model), lane("outside"), active=1)
        scene.wait()
        assert list(scene.serve()) == [chosen]


def test_a_replica_that_must_load_the_adapter_is_a_second_behind() -> None:
    slow = LatencyModel(alpha0=0.10, alpha1=0.01, pi0=0.1, pi1=0.001)  # 1.3 s instead of 0.5
    scene = Scene(lane("holds", model=slow, adapters={"x": "1"}), lane("loads"))
    scene.wait(adapter="x")
    assert list(scene.serve()) == ["holds"]
    scene = Scene(lane("holds", model=slow, adapters={"x": "1"}), lane("loads"))
    scene.wait()
    assert list(scene.serve()) == ["loads"], "the base is everywhere"
    slower = LatencyModel(alpha0=0.13, alpha1=0.01, pi0=0.1, pi1=0.001)
    scene = Scene(lane("holds", model=slower, adapters={"x": "1"}), lane("loads"))
    scene.wait(adapter="x")
    assert list(scene.serve()) == ["loads"]


def test_without_a_model_the_share_of_the_limit_decides() -> None:
    scene = Scene(lane("a", model=None, b_limit=2), lane("b", model=None, b_limit=4))
    for n in range(6):
        scene.wait(f"q{n}", latest=float(n))
    assert scene.serve() == {"a": ("q0", "q3"), "b": ("q1", "q2", "q4", "q5")}


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"kv_total": 220}, True),
        ({"kv_total": 219}, False),
        ({"context": 110}, True),
        ({"context": 109}, False),
    ],
)
def test_memory_and_context_must_hold_it(limits: dict[str, int], fits: bool) -> None:
    made = lane("r", **limits)
    scene = Scene(made)
    made.kv = 110
    scene.wait()
    assert bool(scene.serve()) is fits


def test_limits_hold_with_the_margin_unless_the_replica_is_empty() -> None:
    def goes(deadline: float, *, old: bool = False, price: float = 0.0, **more: float) -> bool:
        made = lane("r")
        if old:
            occupy(made)
        scene = Scene(made, safety=0.1)
        scene.placement.epsilon = 0.05
        scene.wait(deadline=deadline, **more)
        return bool(scene.serve(price=price))

    assert goes(0.501), "0.5 s, alone: nobody is hurt by it"
    assert not goes(0.499)
    assert not goes(0.59, price=1.0), "under overload with 0.05 + 0.1 * 0.5"
    assert goes(0.61, price=1.0)
    assert goes(0.76, old=True), "0.64 + 0.05 + 0.064"
    assert not goes(0.75, old=True)
    assert not goes(9.0, ttft_deadline=0.199), "its first token"
    assert goes(9.0, ttft_deadline=0.21)
    assert not goes(9.0, old=True, ttft_deadline=0.35), "0.24 + 0.05 + 0.064"
    assert goes(9.0, old=True, ttft_deadline=0.36)


def test_nobody_in_flight_is_made_late() -> None:
    def goes(slack: float, safety: float = 0.0) -> bool:
        made = lane("r")
        occupy(made)
        made.slack = slack
        scene = Scene(made, safety=safety)
        scene.placement.epsilon = 0.05
        scene.wait()
        return bool(scene.serve())

    assert goes(0.351), "0.3 and the overhead"
    assert not goes(0.349)
    assert goes(0.381, safety=0.1)
    assert not goes(0.379, safety=0.1)


# ------------------------------------------------------------ when


def test_a_replica_takes_part_shortly_before_its_prompts_are_through() -> None:
    made = lane("r", b_limit=4)
    scene = Scene(made, lead=0.05)
    for n in range(3):
        scene.wait(f"q{n}", latest=float(n))
    assert scene.serve() == {"r": ("q0",)}
    assert scene.placement.wake == pytest.approx(0.2 - 0.05)
    assert scene.serve(0.14) == {}
    assert scene.placement.wake == pytest.approx(0.15)
    assert scene.serve(0.151) == {"r": ("q1",)}


def test_the_next_to_be_through_sets_the_clock() -> None:
    a, b, c = lane("a"), lane("b"), lane("c", b_limit=0)
    a.prefill_end, b.prefill_end, c.prefill_end = 3.0, 2.0, 1.0
    scene = Scene(a, b, c)
    assert scene.placement.open(0.0) is False
    assert scene.placement.wake == pytest.approx(1.98), "a full one does not count"
    a.prefill_end = 0.02
    assert scene.placement.open(0.0) is True
    assert scene.placement._lanes == [a]


def test_one_whose_members_have_no_slack_is_not_open() -> None:
    made = lane("r")
    scene = Scene(made)
    scene.placement.epsilon, scene.macro.least_delay = 0.01, 0.05
    made.release(Waiting(request("old", deadline=0.56), 10.0, 0.5, 9.0, 0.0), 0.0)  # 0.5 s
    made.prefill_end = 0.0
    assert made.slack == pytest.approx(0.06)
    scene.macro.least_delay = 0.0501
    assert scene.placement.open(0.0) is False
    assert scene.placement.wake == math.inf
    scene.macro.least_delay = 0.0499
    assert scene.placement.open(0.0) is True


def test_a_full_replica_leaves_the_decision() -> None:
    free = LatencyModel()  # prompts take no time
    scene = Scene(lane("a", model=free, b_limit=2), lane("b", model=free, b_limit=1))
    for n in range(5):
        scene.wait(f"q{n}", latest=float(n))
    assert scene.serve() == {"a": ("q0", "q1"), "b": ("q2",)}
    assert scene.placement.wake == math.inf
    assert [w.request.id for w in scene.queues.waiting.values()] == ["q3", "q4"]


def test_of_many_replicas_only_some_are_considered() -> None:
    lanes = [lane(f"r{n:02}") for n in range(LANES_TRIED)]
    scene = Scene(*lanes)
    assert scene.placement.open(0.0)
    assert scene.placement._lanes == lanes


def test_a_released_request_is_in_every_book() -> None:
    made = lane("r")
    scene = Scene(made, safety=0.5)
    scene.shares.enter("other")
    w = scene.wait(latest=4.0, deadline=9.0)
    (release,) = scene.releases(1.0)
    assert release.why["slack:q"] == 3.0
    assert release.why["predicted:q"] == 0.5
    assert scene.placement.where == {"q": made}
    assert (len(scene.queues), w.place) == (0, GONE)
    assert scene.shares.counter("") == 120.0
    assert not scene.shares.several
    assert made.slack == pytest.approx(9.0 - 1.5 - 0.25), "half its time is kept back"
    assert scene.macro.promised(1.0) == pytest.approx(0.2)
