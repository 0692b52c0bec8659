"""The pacing policy as a whole, decision by decision."""

from __future__ import annotations

import pytest

from services.dispatcher.policies.base import (
    Action,
    Promote,
    Release,
    Shed,
    StepSeen,
)
from services.dispatcher.policies.collm import FCFS_HORIZON, Collm
from services.dispatcher.policies.parts.lengths import KNOWN
from services.dispatcher.policies.parts.waiting import DEFERRED, LATE, MAIN, Waiting
from shared.latency import LatencyModel
from tests.dispatcher.made import ask, done, request, told, view, where

# A request of 100 and 10 tokens alone: 0.2 s of prompt, 0.3 of answer.
MODEL = LatencyModel(alpha0=0.02, alpha1=0.01, pi0=0.1, pi1=0.001)


def one(limit: int = 4, model: LatencyModel | None = MODEL, **options: object) -> Collm:
    """Told of one replica at 0, with what it knows of it."""
    policy = Collm(**options)  # type: ignore[arg-type]
    told(policy, view("r", b_limit=limit, latency=model))
    policy.decide(0.0)
    return policy


def arrived(policy: Collm, now: float = 0.0, **more: object) -> Waiting:
    """The request as the policy sees it when it comes."""
    made = request(**more)
    policy.on_arrival(made, now)
    return policy._queues.waiting[made.id]


def order(actions: list[Action]) -> list[object]:
    return [a.why["order"] for a in actions if isinstance(a, Release)]


# ------------------------------------------------------------ arrival


def test_its_cost_is_its_prompt_and_its_tokens_at_usual_concurrency() -> None:
    w = arrived(one())
    assert (w.output, w.arrived) == (10.0, 0.0)
    assert w.cost == pytest.approx(0.2 + 10 * 0.03)
    assert arrived(Collm()).cost == 0.0, "nothing is known yet"


@pytest.mark.parametrize(
    ("limits", "latest"),
    [
        ({"deadline": 3.0}, 3.0 - 0.5),
        ({"ttft_deadline": 3.0}, 3.0 - 0.2),
        ({"deadline": 3.0, "ttft_deadline": 2.0}, 1.8),
        ({"deadline": 3.0, "ttft_deadline": 2.9}, 2.5),
        ({}, FCFS_HORIZON),
        ({"tpot": 0.5}, FCFS_HORIZON),
    ],
)
def test_its_slack_ends_when_it_could_only_just_make_its_limits(
    limits: dict[str, float], latest: float
) -> None:
    w = arrived(one(), **limits)
    assert w.latest == pytest.approx(latest)
    assert w.place == MAIN


def test_the_way_back_is_left_as_long_as_the_way_in_took() -> None:
    policy = one()
    assert arrived(policy, 0.25, deadline=3.0).latest == pytest.approx(3.0 - 0.5 - 0.25)
    w = arrived(one(), 0.25, ttft_deadline=3.0)
    assert w.latest == pytest.approx(3.0 - 0.2 - 0.25)
    assert arrived(one(), 5.0, arrival=2.0).latest == 2.0 + FCFS_HORIZON


def test_without_a_model_only_the_way_counts() -> None:
    assert arrived(Collm(), deadline=3.0).latest == 3.0


def test_one_that_cannot_make_it_is_late_at_once_unless_it_has_no_limit() -> None:
    assert arrived(one(), deadline=0.49).place == LATE
    assert arrived(one(), deadline=0.51).place == MAIN
    old = arrived(one(), 99.0, arrival=0.0)
    assert (old.latest < 99.0, old.place) == (True, MAIN)


def test_one_worth_less_than_the_price_is_deferred_at_once() -> None:
    policy = one()
    policy._plan.price = 25.0
    assert arrived(policy, id="cheap", deadline=9.0).place == DEFERRED  # 10 tokens in 0.5 s
    assert arrived(policy, id="free").place == MAIN, "one without limits is not weighed"
    policy._plan.price = 19.0
    assert arrived(policy, id="dear", deadline=9.0).place == MAIN


def test_an_arrival_asks_for_a_new_plan() -> None:
    policy = one()
    assert not policy._plan.changed
    arrived(policy)
    assert policy._plan.changed


# ------------------------------------------------------------ other events


def test_a_cancelled_request_leaves_its_queue_and_its_tenant() -> None:
    policy = one()
    for key, tenant in (("a", "x"), ("b", "y")):
        arrived(policy, id=key, tenant=tenant)
    assert policy.queued() == 2
    assert policy.on_cancel("a", 0.0) is True
    assert policy.on_cancel("a", 0.0) is False
    assert policy.queued() == 1
    assert not policy.shares.several
    assert where(policy.decide(0.0)) == {"r": ("b",)}


def test_what_ended_frees_its_place_and_teaches() -> None:
    policy = one(limit=1)
    assert where(ask(policy, request("a"), request("b"))) == {"r": ("a",)}
    policy.on_completion(done("a", replica="another"), 0.4)
    policy.on_completion(done("unknown"), 0.4)
    assert policy.decide(0.4) == []
    policy.on_completion(done("a", tokens=7), 0.492)
    lane = policy.lanes["r"]
    # 0.5 s for ten tokens, 0.41 s for seven
    assert lane.bias == pytest.approx(1.0 + 0.1 * (0.492 / 0.41 - 1))
    assert policy.lengths._all.count == 1
    assert where(policy.decide(0.6)) == {"r": ("b",)}
    policy.on_completion(done("b", tokens=0, reason="cancelled"), 0.7)
    assert policy.lengths._all.count == 1
    assert lane.bias == pytest.approx(1.02), "what was cancelled says nothing of speed"
    assert policy._placement.where == {}


@pytest.mark.parametrize(
    ("tokens", "reason", "counts"),
    [(5, "stop", 1), (5, "length", 1), (0, "stop", 0), (5, "failed", 0), (5, "lost", 0)],
)
def test_only_whole_answers_teach(tokens: int, reason: str, counts: int) -> None:
    policy = one()
    ask(policy, request("a"))
    policy.on_completion(done("a", tokens=tokens, reason=reason), 5.0)
    assert policy.lengths._all.count == counts
    assert (policy.lanes["r"].bias > 1.0) is bool(counts)


def test_a_lost_replica_is_forgotten_with_what_was_on_it() -> None:
    policy = one()
    ask(policy, request("a"))
    policy.on_step(_step("r"), 0.1)
    policy.on_replica_gone("r", 0.1)
    policy.on_replica_gone("r", 0.1)
    assert (policy.lanes, policy._placement.where, policy.fit._own) == ({}, {}, {})
    policy.on_completion(done("a"), 0.2)
    assert ask(policy, request("b"), now=0.3) == []
    assert policy.queued() == 1


def _step(replica: str) -> StepSeen:
    return StepSeen(
        replica=replica, seconds=0.1, steps=1, b=9, B=0, prefill_tokens=0, decode_tokens=9
    )


def test_steps_are_fitted_and_tell_the_usual_concurrency() -> None:
    policy = one()
    policy.on_step(_step("r"), 0.1)
    assert policy.fit._all.count == 1
    policy.decide(5.0)
    assert policy.macro.token_seconds == pytest.approx(0.01 + 0.02 / 1.4)


def test_a_record_without_coefficients_keeps_those_that_are_known() -> None:
    policy = one()
    told(policy, view("r", b_limit=4))
    assert policy.lanes["r"].latency is MODEL
    other = LatencyModel(alpha0=1.0)
    told(policy, view("r", latency=other))
    assert policy.lanes["r"].latency is other


def test_a_new_replica_takes_what_all_showed() -> None:
    policy = one(model=None)
    for n in range(30):
        policy.on_step(
            StepSeen(
                replica="r", seconds=0.02 + 0.01 * (n % 5 + 1), steps=1, b=n % 5 + 1, B=0,
                prefill_tokens=0, decode_tokens=n % 5 + 1,
            ),
            0.1,
        )  # fmt: skip
    told(policy, view("new"))
    assert policy.lanes["new"].alpha0 == pytest.approx(0.02, rel=0.02)


def test_what_runs_since_before_a_restart_holds_its_place_and_makes_nobody_late() -> None:
    policy = one(limit=2)
    policy.restore("r", (request("old"),), 0.0)
    policy.restore("unknown", (request("lost"),), 0.0)
    assert list(policy._placement.where) == ["old"]
    lane = policy.lanes["r"]
    assert (len(lane.flight), lane.prefill_end) == (1, 0.0)
    assert policy.macro._taken == {lane}, "it is not idle"
    assert where(ask(policy, request("a"), request("b"), now=0.0)) == {"r": ("a",)}
    policy.on_completion(done("old"), 1.0)
    assert where(policy.decide(1.0)) == {"r": ("b",)}


def test_prompts_from_before_a_restart_have_begun() -> None:
    """Twenty at once would otherwise keep the next one away for four seconds."""
    policy = one(limit=40)
    policy.restore("r", [request(f"old{n}", deadline=9.0) for n in range(20)], 1.0)
    lane = policy.lanes["r"]
    assert (len(lane.flight), lane.prefill_end) == (20, 1.0)
    assert lane.slack < 9.0 - 1.0, "their limits count"
    assert lane.kv == 20 * 110
    assert where(ask(policy, request("a", arrival=1.0), now=1.0)) == {"r": ("a",)}


def test_what_is_restored_leaves_no_spare_replica() -> None:
    policy = one(limit=4)
    policy.macro.rate.work = 5.0
    assert policy.macro.at_rest() is False
    assert policy.macro.spare() == 0
    policy.macro.rate.work = 0.0
    assert policy.macro.at_rest()
    policy.restore("r", (request("old"),), 0.0)
    assert not policy.macro.at_rest()
    policy.on_completion(done("old"), 0.1)
    assert policy.lanes["r"].bias == 1.0, "since when it ran is not known"


# ------------------------------------------------------------ decisions


def test_requests_are_held_until_the_prompts_before_them_are_nearly_through() -> None:
    policy = one(lead=0.05)
    assert where(ask(policy, request("a"), request("b"))) == {"r": ("a",)}
    assert policy.next_wake(0.0) == pytest.approx(0.15)
    assert policy.decide(0.1) == []
    assert where(policy.decide(0.151)) == {"r": ("b",)}
    assert policy.next_wake(0.2) == 1.0, "the next cycle"
    assert policy.next_wake(3.0) == 3.0, "never in the past"


def test_the_usual_lead_is_a_fiftieth_of_a_second() -> None:
    policy = one()
    ask(policy, request("a"), request("b"))
    assert policy.next_wake(0.0) == pytest.approx(0.18)


def test_it_wakes_when_the_next_request_becomes_hopeless() -> None:
    policy = one(limit=1)
    ask(policy, request("a", max_tokens=500))
    ask(policy, request("b", deadline=1.3))
    assert policy.next_wake(0.0) == pytest.approx(0.8 + 1e-4)
    policy.decide(0.8 + 1e-4)
    assert policy._queues.late_count == 1


@pytest.mark.parametrize(("lag", "margin"), [(0.0, 0.01), (0.06, 0.06)])
def test_the_margin_is_what_the_way_takes_and_epsilon_at_least(lag: float, margin: float) -> None:
    """Beside the other request it takes 0.64 s."""
    for spare, goes in ((0.001, {"r": ("q",)}), (-0.001, {})):
        policy = one(epsilon=0.01, safety=0.0)
        ask(policy, request("old"))
        now = 1.0 + lag
        policy.lanes["r"].prefill_end = now
        # it has the slack it needs: alone it takes 0.5 s
        asked = request("q", arrival=1.0, deadline=now + 0.64 + margin + spare)
        assert where(ask(policy, asked, now=now)) == goes


def test_overhead_is_four_milliseconds_and_three_hundredths_of_a_time_at_least() -> None:
    for slack, goes in ((0.684 - 0.64, True), (0.662 - 0.64, False)):
        policy = one()
        ask(policy, request("old"))
        policy.lanes["r"].prefill_end = 0.2
        actions = ask(policy, request("q", arrival=0.2, deadline=0.84 + slack), now=0.2)
        assert bool(where(actions)) is goes


def test_a_price_is_found_under_overload_and_what_is_worth_less_waits() -> None:
    policy = one(limit=1)
    dear = request("dear", max_tokens=40, deadline=1.45)
    cheap = request("cheap", max_tokens=2, prompt_tokens=500, deadline=1.3)
    assert where(ask(policy, cheap, dear)) == {"r": ("dear",)}
    assert policy._queues.waiting["cheap"].place == DEFERRED
    assert policy._plan.price > 0


def test_hopeless_ones_are_served_where_room_is_left() -> None:
    policy = one()
    actions = ask(policy, request("late", deadline=0.1))
    assert where(actions) == {"r": ("late",)}
    assert order(actions) == ["hopeless, after all others"]


def test_hopeless_ones_are_refused_with_the_time_until_the_queue_is_drained() -> None:
    policy = one(limit=1, on_overload="shed")
    for _ in range(KNOWN):
        policy.lengths.learn(request(), done(tokens=10))
    assert where(ask(policy, request("a"))) == {"r": ("a",)}
    waiting = [request(f"q{n}") for n in range(9)]
    actions = ask(policy, *waiting, request("p", deadline=0.4), now=0.0)
    # the prompt of 0.2 s and nine requests of 0.5 s
    assert actions == [
        Shed(
            request="p",
            reason="cannot be answered within its latency limits: slack -0.100 s, "
            "10 output tokens expected",
            retry_after=5,
        )
    ]
    assert policy.queued() == 9
    unknown = ask(one(on_overload="shed"), request("q", deadline=0.4))
    assert where(unknown) == {"r": ("q",)}, "lengths are not known: served, or it waits for ever"


def test_a_refused_request_may_come_again_after_a_second_at_least() -> None:
    policy = one(on_overload="shed")
    for _ in range(KNOWN):
        policy.lengths.learn(request(), done(tokens=10))
    (shed,) = ask(policy, request("p", deadline=0.4, tenant="x"))
    assert isinstance(shed, Shed)
    assert shed.retry_after == 1
    assert policy.shares._waiting == {}


def test_an_idle_replica_is_promoted_for_those_that_wait() -> None:
    policy = Collm()
    told(policy, view("i", dispatchable=False, idle=True))
    assert policy.decide(0.0) == [], "nobody waits"
    (promote,) = ask(policy, request())
    assert isinstance(promote, Promote)
    assert promote.replica == "i"


def test_load_that_expired_waiting_makes_training_give_way() -> None:
    policy = Collm()
    told(policy, view("r", b_limit=1, training=True, latency=MODEL))
    policy.decide(0.0)
    ask(policy, *(request(f"q{n}", max_tokens=100, deadline=6.0) for n in range(40)))
    policy.decide(5.9)
    assert policy.macro._short, "some became hopeless"


def test_options_have_their_names() -> None:
    with pytest.raises(TypeError, match=r"on_overload: best_effort or shed expected, 'no' given"):
        Collm(on_overload="no")
    policy = Collm(headroom=0.5, prior_output=7.0, output_quantile=0.5, consolidate=False)
    assert (policy.macro._headroom, policy.macro._consolidate) == (0.5, False)
    assert (policy.lengths._prior, policy.lengths._quantile) == (7.0, 0.5)
    usual = Collm()
    assert (usual.macro._headroom, usual.macro._consolidate) == (0.2, True)
    assert (usual.lengths._prior, usual.lengths._quantile) == (128.0, 0.8)
