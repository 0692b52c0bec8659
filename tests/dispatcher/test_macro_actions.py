"""The macro cycle: B = 0, promotion, and the books it keeps for the micro cycle."""

from __future__ import annotations

import math

import pytest

from services.dispatcher.policies.base import Promote, Suspend
from services.dispatcher.policies.collm import Collm
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.macro import PROMOTE_SECONDS, Macro
from services.dispatcher.policies.parts.rest import QUIET_SECONDS
from services.dispatcher.policies.parts.waiting import Waiting
from tests.dispatcher.cluster import RATE, arrive, cluster, known
from tests.dispatcher.made import request, told, view

# ------------------------------------------------------------ B = 0


def _short(policy: Collm, now: float, asked: int) -> list[object]:
    """The decisions of a cycle after so many arrivals, some of which became hopeless."""
    for n in range(asked):
        arrive(policy.macro, f"p{now}{n}")
    policy.macro.expired(1 if asked else 0)
    return list(policy.macro.cycle(policy, now))


def test_training_gives_way_when_all_together_are_not_enough_and_goes_on_in_a_lull() -> None:
    policy = cluster(known("a", training=True), known("b"), asked=2)
    policy.macro.expired(0)
    assert _short(policy, 2.0, 3) == [], "they carry it"
    suspended = Suspend(replicas=("a",), wanted=True)
    assert _short(policy, 3.0, 50) == [suspended]
    assert _short(policy, 4.0, 50) == [], "asked for already"
    for second in range(5, 40):
        found = _short(policy, float(second), 0)
        need, capacity = 1.2 * policy.macro.rate.expected, policy.macro._capacity
        if found:
            break
        assert need >= 0.7 * capacity
    assert found == [Suspend(replicas=("a",), wanted=False)]
    assert need < 0.7 * capacity
    assert _short(policy, 50.0, 0) == []


def test_the_wish_is_repeated_once_a_minute_while_they_are_not_enough() -> None:
    """The coordinator forgets it after two minutes."""
    policy = cluster(known("a", training=True), known("b", training=True), asked=2)
    asked = []
    for second in range(2, 300):
        many = second < 100 or second >= 230  # between: 0.7 to 1 of what both carry
        for n in range(50 if many else 4):
            arrive(policy.macro, f"p{second}{n}")
        policy.macro.expired(1)
        asked += [(second, each) for each in policy.macro.cycle(policy, float(second))]
        if second == 100:
            told(policy, known("b"))  # its session has ended
    assert asked == [
        (2, Suspend(replicas=("a", "b"), wanted=True)),
        (62, Suspend(replicas=("a", "b"), wanted=True)),
        (122, Suspend(replicas=("a",), wanted=True)),
        (230, Suspend(replicas=("a",), wanted=True)),
        (290, Suspend(replicas=("a",), wanted=True)),
    ]


@pytest.mark.parametrize("in_need", [True, False])
def test_after_a_burst_training_goes_on_though_the_load_is_high(in_need: bool) -> None:
    """Unless requests still come too late."""
    policy = cluster(known("a", training=True), known("b", training=True), asked=2)
    taken_back = None
    for second in range(2, 40):
        for n in range(50 if second < 10 else 4):  # then: 0.7 to 1 of what both carry
            arrive(policy.macro, f"p{second}{n}")
        policy.macro.expired(1 if in_need or second < 10 else 0)
        for each in policy.macro.cycle(policy, float(second)):
            if each == Suspend(replicas=("a", "b"), wanted=False):
                taken_back = taken_back or second
    assert taken_back == (None if in_need else 9 + QUIET_SECONDS + 1)


def test_load_alone_stops_no_training_as_long_as_nobody_was_late() -> None:
    policy = cluster(known("a", training=True), asked=50)
    assert policy.macro.cycle(policy, 2.0) == []
    policy.macro.expired(1)
    policy.macro.replicas_changed = True
    assert policy.macro.cycle(policy, 2.1) != []
    idle = cluster(known("a"), asked=50)
    idle.macro.expired(1)
    assert idle.macro.cycle(idle, 2.0) == [], "nobody trains"


def test_one_that_began_to_train_meanwhile_is_asked_too() -> None:
    policy = cluster(known("a", training=True), known("b"), asked=2)
    assert _short(policy, 2.0, 50) == [Suspend(replicas=("a",), wanted=True)]
    told(policy, known("b", training=True))
    assert _short(policy, 3.0, 50) == [Suspend(replicas=("a", "b"), wanted=True)]


# ------------------------------------------------------------ promotion


def test_the_best_idle_replica_is_promoted_when_those_that_serve_are_not_enough() -> None:
    idle = {"dispatchable": False, "idle": True}
    policy = cluster(
        known("a"), known("i", **idle), known("k", quality=2.0, **idle),
        known("j", quality=2.0, **idle), asked=5,
    )  # fmt: skip
    policy.on_arrival(request("waits"), 1.0)
    (promote,) = policy.macro.promote(policy, 1.0)
    assert isinstance(promote, Promote)
    assert promote.replica == "k"
    assert promote.why == {"expected_rate": 5.0, "capacity": round(RATE, 3), "queued": 1}
    assert policy.macro.promote(policy, 1.0 + PROMOTE_SECONDS / 2) == []
    assert len(policy.macro.promote(policy, 1.001 + PROMOTE_SECONDS)) == 1


def test_nobody_is_promoted_while_those_that_serve_carry_the_load() -> None:
    idle = known("i", dispatchable=False, idle=True)
    policy = cluster(known("a"), idle, asked=2)
    assert policy.macro.promote(policy, 1.0) == []
    policy.macro.expired(1)
    assert len(policy.macro.promote(policy, 1.0)) == 1, "somebody was late"
    assert cluster(known("a"), asked=99).macro.promote(policy, 1.0) == [], "nobody is Idle"
    alone = cluster(idle, asked=1)
    assert len(alone.macro.promote(alone, 1.0)) == 1, "nobody serves"


# ------------------------------------------------------------ for the micro cycle


def many(count: int, **options: object) -> tuple[Macro, list[Lane]]:
    policy = cluster(*(known(f"r{n:02}") for n in range(count)), **options)  # type: ignore[arg-type]
    return policy.macro, policy.macro.order


def test_promised_is_the_prompts_that_are_not_through() -> None:
    macro, lanes = many(3)
    for n, lane in enumerate(lanes):
        lane.prefill_end = 1.0 + n
        macro.engaged(lane)
    assert macro.promised(1.5) == pytest.approx(0.5 + 1.5)
    lanes[1].view = view("gone", dispatchable=False)
    assert macro.promised(1.5) == pytest.approx(1.5)
    assert macro.promised(3.0) == 0.0
    assert macro._engaged == {}


def test_replicas_with_hopeless_requests_are_known() -> None:
    macro, (lane, _) = many(2)
    macro.engaged(lane)
    assert macro.background == set()
    lane.background = 1
    macro.engaged(lane)
    macro.freed(lane)
    assert macro.background == {lane}
    lane.background = 0
    macro.freed(lane)
    assert macro.background == set()
    lane.view = view("r", dispatchable=False)
    macro.line.renew([], 0)
    macro.freed(lane)
    assert macro.line.inside(9) == ([], True), "it takes nothing"


def test_what_the_load_leaves_over() -> None:
    macro, lanes = many(4)
    assert macro.spare() == 4
    for lane in lanes[:3]:
        lane.release(Waiting(request(f"{lane.view.id}"), 1.0, 1.0, 9.0, 0.0), 0.0)
        macro.engaged(lane)
    macro.rate.work = 2.0
    macro.rate.mean = 1.0
    macro.rate._square = 1.0
    assert macro.spare() == 1, "4 - 2 * 1.2"
    macro.rate.work = 9.0
    assert macro.spare() == 0, "half of the one that is idle"
    lanes[0].leave(lanes[0].view.id, 1.0, learn=False)
    macro.freed(lanes[0])
    assert macro.spare() == 1, "half of the two that are idle"
    macro.gone(lanes[1])
    lanes[2].background = 1
    macro.freed(lanes[2])
    assert macro._taken == set(), "one that runs hopeless requests only is idle, too"


def test_the_backlog_is_shared_by_all_that_serve() -> None:
    macro, lanes = many(4)
    assert macro.backlog_seconds(6.0, 1.0) == 1.5
    lanes[0].prefill_end = 3.0
    macro.engaged(lanes[0])
    assert macro.backlog_seconds(6.0, 1.0) == 2.0
    assert Macro(0.2).backlog_seconds(6.0, 1.0) == 6.0


def test_a_fresh_cycle_is_due_at_once() -> None:
    macro = Macro(0.2)
    assert (macro.next_cycle, macro.active, macro.room) == (-math.inf, 0, 0)
    assert (macro.typical, macro.least_delay, macro.token_seconds) == (None, 0.0, 0.0)
