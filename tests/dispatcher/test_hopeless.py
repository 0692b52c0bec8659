"""What no replica can do in time, what none holds, and what a tenant is charged in the end."""

from __future__ import annotations

import pytest

from services.dispatcher.policies.base import Promote, Request, Shed
from services.dispatcher.policies.collm import Collm
from services.dispatcher.policies.parts.lengths import KNOWN
from services.dispatcher.policies.parts.waiting import APART, MAIN
from shared.latency import LatencyModel
from tests.dispatcher.made import ask, done, request, told, view, where
from tests.dispatcher.test_collm import MODEL, one, order

# ------------------------------------------------------------ what no replica can do in time


def test_a_pace_that_no_replica_keeps_is_hopeless_at_once() -> None:
    """0.03 s a token alone, 0.02 s wanted: waiting for a minute would not help."""
    policy = one()
    actions = ask(policy, request("q", tpot=0.02))
    assert where(actions) == {"r": ("q",)}
    assert order(actions) == ["hopeless, after all others"]
    assert where(ask(one(), request("q", tpot=0.02, deadline=30.0))) == {"r": ("q",)}
    in_time = ask(one(), request("q", tpot=0.031))
    assert order(in_time) == ["slack"]
    assert order(ask(one(), request("q", tpot=0.031, max_tokens=2))) == ["slack"], "a short one"


def test_hopeless_is_what_the_replicas_at_hand_say_not_their_mean_without_training() -> None:
    for quick, placed in ((True, "slack"), (False, "hopeless, after all others")):
        policy = Collm()
        told(policy, view("slow", B=3, latency=LatencyModel(alpha0=0.02, alpha1=0.01, alpha2=0.02)))
        if quick:
            told(policy, view("quick", latency=MODEL))
        policy.decide(0.0)
        assert order(ask(policy, request("q", tpot=0.04))) == [placed]


def test_so_it_is_with_a_deadline() -> None:
    """0.3 s by the mean without training, 0.9 s beside it."""
    policy = Collm()
    model = LatencyModel(alpha0=0.02, alpha1=0.01, alpha2=0.02)
    told(policy, view("slow", B=3, latency=model))
    policy.decide(0.0)
    policy.on_arrival(request("q", deadline=0.6), 0.0)
    assert policy._queues.waiting["q"].place == MAIN, "it has 0.3 s of slack, by the mean"
    assert order(policy.decide(0.0)) == ["hopeless, after all others"]
    near = Collm()
    told(near, view("slow", B=3, latency=model))
    near.decide(0.0)
    assert ask(near, request("q", deadline=0.85)) == []
    assert near._queues.waiting["q"].place == MAIN, "predictions are not that good"


def test_one_that_is_hopeless_at_hand_is_refused_at_once_where_hopeless_ones_are() -> None:
    policy = one(on_overload="shed")
    for _ in range(KNOWN):
        policy.lengths.learn(request(), done(tokens=10))
    assert ask(policy, request("q", tpot=0.02)) == []
    assert policy.next_wake(0.0) == 0.0
    (shed,) = policy.decide(0.0)
    assert isinstance(shed, Shed)
    assert policy.next_wake(0.0) == 1.0, "the next cycle"


def test_an_idle_replica_that_could_do_it_is_promoted_for_those_to_come() -> None:
    fast = LatencyModel(alpha0=0.001)
    for model, promoted in ((fast, ["i"]), (MODEL, [])):
        policy = one()
        told(policy, view("i", dispatchable=False, idle=True, latency=model))
        ask(policy, request("first", tpot=0.02))
        assert policy.queued() == 0
        actions = ask(policy, request("second", tpot=0.02), request("third", tpot=0.02))
        assert [a.replica for a in actions if isinstance(a, Promote)] == promoted


def test_a_price_ends_when_what_was_given_up_is_gone_though_nothing_comes() -> None:
    policy = one(limit=1)
    dear = request("dear", max_tokens=40, deadline=1.45)
    cheap = request("cheap", max_tokens=2, prompt_tokens=500, deadline=1.3)
    ask(policy, cheap, dear)
    assert policy._plan.price > 0
    policy.on_completion(done("dear", tokens=40), 1.4)
    ask(policy, request("free"), now=1.4)
    policy.on_completion(done("cheap", tokens=2), 2.0)
    policy.on_arrival(request("last", max_tokens=9), 2.0)
    policy.decide(2.1)
    policy._plan.changed = False
    policy.decide(3.0)
    assert policy._plan.price == 0.0


# ------------------------------------------------------------ what no replica holds


def large(key: str, **more: object) -> Request:
    return request(key, prompt_tokens=5000, **more)


def test_one_that_only_an_idle_replica_holds_has_it_promoted_and_holds_up_nobody() -> None:
    policy = Collm()
    told(
        policy,
        view("small", latency=MODEL, context=1000),
        view("i", dispatchable=False, idle=True, quality=3.0, context=2000, latency=MODEL),
        view("large", dispatchable=False, idle=True, context=8000, latency=MODEL),
    )
    policy.decide(0.0)
    actions = ask(policy, *(large(f"q{n}") for n in range(20)), request("fits", arrival=1.0))
    assert where(actions) == {"small": ("fits",)}
    (promote,) = (a for a in actions if isinstance(a, Promote))
    assert (promote.replica, promote.why["holds_tokens"]) == ("large", 5010)
    assert all(policy._queues.waiting[f"q{n}"].place == APART for n in range(20))
    told(policy, view("large", context=8000, latency=MODEL))
    assert where(policy.decide(1.0)) == {"large": ("q0",)}
    assert policy.queued() == 19
    policy.on_replica_gone("large", 2.0)
    policy.decide(2.0)
    assert policy.on_cancel("q5", 2.0)
    assert policy.queued() == 18


def test_one_that_waits_apart_becomes_late_like_any_other() -> None:
    policy = Collm()
    told(policy, view("small", latency=MODEL, context=1000))
    policy.decide(0.0)
    ask(policy, large("q", deadline=9.0))
    waiting = policy._queues.waiting["q"]
    assert waiting.place == APART
    policy.decide(8.0)
    policy.macro.rate.work = 0.0  # there is a replica to spare
    policy.decide(8.05)
    assert (waiting.place, policy._queues.late_count) == (APART, 0), "it was late, now apart again"
    told(policy, view("large", context=8000, latency=MODEL))
    actions = policy.decide(8.1)
    assert where(actions) == {"large": ("q",)}
    assert order(actions) == ["hopeless, after all others"]


# ------------------------------------------------------------ shares


@pytest.mark.parametrize(
    ("tokens", "reason", "charged"),
    [(7, "stop", 100 + 14), (0, "cancelled", 100), (3, "cancelled", 106), (0, "failed", 0)],
)
def test_a_tenant_is_charged_what_it_got(tokens: int, reason: str, charged: int) -> None:
    policy = one(limit=1)
    for key, tenant in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "z")):
        policy.on_arrival(request(key, tenant=tenant), 0.0)
    ((first, *_),) = where(policy.decide(0.0)).values()
    tenant = {"a": "x", "c": "y", "d": "z"}[first]
    assert policy.shares.counter(tenant) == 120
    policy.on_completion(done(first, tokens=tokens, reason=reason), 0.5)
    assert policy.shares.counter(tenant) == charged
