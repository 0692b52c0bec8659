"""The macro cycle: order and active set, capacity, coefficients."""

from __future__ import annotations

import pytest

from services.dispatcher.policies.base import StepSeen
from services.dispatcher.policies.collm import Collm
from services.dispatcher.policies.parts.fit import NEEDED
from services.dispatcher.policies.parts.macro import Macro
from shared.latency import LatencyModel
from tests.dispatcher.cluster import MODEL, SLOW, arrive, cluster, known, order
from tests.dispatcher.made import told, view

# ------------------------------------------------------------ order and active set


def test_replicas_are_ordered_by_quality_times_rate_then_by_name() -> None:
    policy = cluster(
        known("slow", latency=SLOW),
        known("b"),
        known("a"),
        known("good", quality=1.5),
        known("idle", dispatchable=False, idle=True),
        asked=1,
    )
    assert order(policy) == ["good", "a", "b", "slow"]
    assert [lane.rank for lane in policy.macro.order] == [0, 1, 2, 3]
    assert policy.macro.room == 8


@pytest.mark.parametrize(("asked", "active"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (50, 3)])
def test_the_smallest_set_that_carries_the_rate_with_headroom_is_active(
    asked: int, active: int
) -> None:
    """One carries 2.857 requests/s; wanted are 1.2 times those asked."""
    assert cluster(known("a"), known("b"), known("c"), asked=asked).macro.active == active


def test_without_consolidation_all_are_active() -> None:
    policy = cluster(known("a"), known("b"), known("c"), asked=1, consolidate=False)
    assert policy.macro.active == 3


def test_a_replica_of_which_nothing_is_known_is_active_and_counts_as_one_a_second() -> None:
    policy = cluster(known("a"), view("new"), asked=1)
    assert order(policy) == ["a", "new"]
    assert policy.macro.active == 2
    policy.on_replica_gone("a", 1.0)
    policy.macro.cycle(policy, 1.1)
    assert policy.macro._capacity == 1.0


def test_the_cycle_comes_once_a_second_or_when_a_replica_changed() -> None:
    policy = cluster(known("a"))
    assert policy.macro.next_cycle == 2.0
    arrive(policy.macro)
    told(policy, known("b"))
    policy.macro.cycle(policy, 1.5)
    assert order(policy) == ["a", "b"]
    assert (policy.macro.next_cycle, policy.macro.rate.mean) == (2.0, 0.0), "no second is over"
    policy.macro.cycle(policy, 2.0)
    assert policy.macro.next_cycle == 3.0
    assert policy.macro.rate.mean > 0


def test_a_lost_replica_is_in_no_book() -> None:
    policy = cluster(known("a"), known("b"), known("i", dispatchable=False, idle=True))
    lane = policy.lanes["b"]
    lane.background = 1
    policy.macro.engaged(lane)
    policy.on_replica_gone("b", 1.0)
    policy.on_replica_gone("i", 1.0)
    policy.macro.cycle(policy, 1.1)
    assert order(policy) == ["a"]
    assert policy.macro.background == set()
    assert policy.macro.idle == {}
    assert policy.macro.promised(1.1) == 0.0


def test_a_replica_that_stops_serving_leaves_the_order() -> None:
    policy = cluster(known("a"), known("b"))
    told(policy, known("b", dispatchable=False, idle=True))
    policy.macro.cycle(policy, 1.1)
    assert order(policy) == ["a"]
    assert list(policy.macro.idle) == [policy.lanes["b"]]


# ------------------------------------------------------------ what is seen


def test_the_typical_replica_is_the_mean_of_all_without_training() -> None:
    policy = cluster(known("a", B=8), known("b", latency=SLOW), view("new"))
    typical = policy.macro.typical
    assert typical is not None
    found = (typical.alpha0, typical.alpha1, typical.pi0, typical.pi1)
    assert found == pytest.approx((0.03, 0.01, 0.2, 0.001))
    assert policy.macro.least_delay == pytest.approx(0.1)
    assert policy.macro.token_seconds == pytest.approx(0.01 + 0.03)
    told(policy, known("b"))
    policy.macro.cycle(policy, 1.1)
    assert policy.macro.typical == LatencyModel(alpha0=0.02, alpha1=0.01, pi0=0.1, pi1=0.001)


def test_a_tokens_time_is_shared_by_those_that_decode_together() -> None:
    policy = cluster(known("a"))
    step = StepSeen(replica="a", seconds=1.0, steps=2, b=9, B=0, prefill_tokens=0, decode_tokens=18)
    policy.macro.saw(step)
    policy.macro.saw(StepSeen(**(_fields(step) | {"decode_tokens": 0})))
    policy.macro.cycle(policy, 2.0)
    assert policy.macro.token_seconds == pytest.approx(0.01 + 0.02 / (1 + 0.05 * 8))
    policy.macro._b = 0.5
    policy.macro.cycle(policy, 3.0)
    assert policy.macro.token_seconds == pytest.approx(0.03), "never more than one decodes alone"


def _fields(step: StepSeen) -> dict[str, object]:
    return {name: getattr(step, name) for name in StepSeen.__struct_fields__}


def test_lengths_and_budget_are_means_of_the_requests() -> None:
    macro = Macro(0.2)
    arrive(macro, prompt_tokens=300, max_tokens=30)
    arrive(macro, prompt_tokens=100, max_tokens=10, arrival=1.0, deadline=3.0)
    assert (macro._prompt, macro._output, macro._budget) == (200.0, 20.0, 2.0)
    arrive(macro, prompt_tokens=200, max_tokens=20, arrival=1.0, deadline=6.0)
    assert (macro._prompt, macro._output) == (200.0, 20.0)
    assert macro._budget == pytest.approx(2.0 + 3.0 / 3)
    for _ in range(97):
        arrive(macro, prompt_tokens=200, max_tokens=20)
    for _ in range(2):
        arrive(macro, prompt_tokens=300, max_tokens=20)
    assert macro._prompt == pytest.approx(200 + 1.0 + 0.99), "a hundredth at least"


def test_work_is_counted_unless_it_is_hopeless() -> None:
    macro = Macro(0.2)
    macro.rate.tick(0.0)
    arrive(macro)
    arrive(macro, hopeless=True)
    macro.rate.tick(1.0)
    assert (macro.rate.mean, macro.rate.work) == (2.0, 0.5)


def test_the_rate_of_a_replica_is_that_at_the_batch_within_the_budget() -> None:
    macro = Macro(0.2)
    arrive(macro, arrival=0.0, deadline=0.56)
    # b = 1: 0.1 + 0.1 + 0.3; b = 2: 0.7 s
    assert macro._rate_of(MODEL, 0, 2) == pytest.approx(1 / 0.5)
    assert macro._rate_of(None, 0, 2) == 1.0
    arrive(macro, arrival=0.0, deadline=0.1)
    assert macro._rate_of(MODEL, 0, 2) == pytest.approx(1 / 0.5), "one at least"
    assert macro._rate_of(LatencyModel(), 0, 2) == 1e6
    slower = LatencyModel(alpha0=0.02, alpha1=0.01, alpha2=0.05, pi0=0.1, pi1=0.001)
    assert macro._rate_of(slower, 1, 2) == pytest.approx(1 / 1.0)


# ------------------------------------------------------------ models that are fitted


def steps(replica: str, count: int, factor: float = 1.0) -> list[StepSeen]:
    return [
        StepSeen(
            replica=replica,
            seconds=factor * (0.02 + 0.01 * (n % 5)),
            steps=1,
            b=n % 5,
            B=0,
            prefill_tokens=0,
            decode_tokens=n % 5,
        )
        for n in range(count)
    ]


def test_replicas_without_coefficients_take_those_of_their_steps_and_the_new_the_pools() -> None:
    policy = Collm()
    told(policy, view("seen"), view("new"), known("told"))
    for step in steps("seen", 2 * int(NEEDED)) + steps("told", 5):
        policy.on_step(step, 0.0)
    policy.macro.cycle(policy, 0.0)
    for name in ("seen", "new"):
        assert policy.lanes[name].latency is not None
        assert policy.lanes[name].alpha0 == pytest.approx(0.02, rel=0.05)
    assert policy.lanes["told"].latency is MODEL
    assert policy.macro._capacity < 2, "an unknown one counts as one a second"
    before = policy.lanes["new"].latency
    for step in steps("new", 2 * int(NEEDED), factor=3.0):
        policy.on_step(step, 0.5)
    policy.macro.cycle(policy, 0.5)
    assert policy.lanes["new"].latency is before, "once a second"
    policy.macro.cycle(policy, 1.0)
    assert policy.lanes["new"].alpha0 == pytest.approx(0.06, rel=0.25)


def test_the_first_coefficients_do_not_wait_for_the_next_second() -> None:
    """In its first second a policy that knows no times places a burst like round robin."""
    policy = Collm()
    told(policy, view("a"), view("b"))
    policy.macro.cycle(policy, 0.0)
    for step in steps("a", int(NEEDED) - 1):
        policy.on_step(step, 0.1)
    policy.macro.cycle(policy, 0.1)
    assert policy.lanes["a"].latency is None
    for step in steps("a", int(NEEDED)):
        policy.on_step(step, 0.1)
    policy.macro.cycle(policy, 0.1)
    for name in ("a", "b"):
        assert policy.lanes[name].alpha0 == pytest.approx(0.02, rel=0.05)
    assert policy.macro.next_cycle == 1.0


def test_kinds_of_replicas_are_forgotten_when_they_are_many_more_than_the_replicas() -> None:
    policy = cluster(known("a"), known("b"))
    for n in range(200):
        told(policy, known("a", B=n))
    assert len(policy.macro._kinds) == 200
    policy.macro.cycle(policy, 2.0)
    assert len(policy.macro._kinds) == 2
    assert sorted(lane.kind for lane in policy.macro.order) == [0, 1]
