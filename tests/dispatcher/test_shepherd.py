"""Shepherd's Flex, decision by decision: feasible batches, preemption, hopeless requests."""

from __future__ import annotations

import pytest

from services.dispatcher.policies.base import (
    Action,
    Preempt,
    Promote,
    Release,
    Request,
    Shed,
    StepSeen,
)
from services.dispatcher.policies.parts.fit import NEEDED
from services.dispatcher.policies.parts.lengths import KNOWN
from services.dispatcher.policies.shepherd import LATE_BATCH, Shepherd
from shared.latency import LatencyModel
from tests.dispatcher.made import ask, done, request, taken_back, told, view, where

# A request of 100 and 10 tokens: 0.11 s of prompt, 0.10 + 0.01 b of answer.
MODEL = LatencyModel(alpha0=0.01, alpha1=0.001, alpha2=0.02, pi0=0.01, pi1=1e-3)


def one(limit: int = 8, **options: object) -> Shepherd:
    policy = Shepherd(**options)  # type: ignore[arg-type]
    told(policy, view("r", b_limit=limit, latency=MODEL))
    return policy


def due(*deadlines: float | None, **more: object) -> list[Request]:
    return [request(f"q{n}", deadline=at, **more) for n, at in enumerate(deadlines)]


def order(actions: list[Action]) -> list[object]:
    return [a.why["order"] for a in actions if isinstance(a, Release)]


# ------------------------------------------------------------ batches


def test_a_batch_is_as_large_as_its_earliest_deadline_lets_it_be() -> None:
    """Of 1, 2, 3, 4 requests: 0.225, 0.335, 0.445, 0.555 s with the margin of 5 ms."""
    for deadline, wanted in ((0.22, 0), (0.23, 1), (0.33, 1), (0.34, 2), (0.45, 3), (0.55, 3)):
        policy = one()
        actions = ask(policy, *due(9.0, 9.0, 9.0, deadline))
        keys = where(actions)["r"]
        if wanted == 0:
            assert keys == ("q0", "q1", "q2"), "that one is hopeless"
        else:
            assert keys == ("q3", "q0", "q1", "q2")[:wanted]
            (release,) = actions
            assert isinstance(release, Release)
            assert release.why == {"order": "largest feasible", "batch": wanted}


def test_training_beside_it_makes_a_batch_slower() -> None:
    policy = Shepherd()
    told(policy, view("r", b_limit=8, B=1, latency=MODEL))
    assert where(ask(policy, *due(0.63, 9.0))) == {"r": ("q0", "q1")}  # 0.335 + 10 * 0.02
    policy = Shepherd()
    told(policy, view("r", b_limit=8, B=1, latency=MODEL))
    assert where(ask(policy, *due(0.53, 9.0))) == {"r": ("q0",)}


def test_the_longest_expected_answer_counts() -> None:
    policy = one()
    short, long = request("q0", deadline=0.5), request("q1", deadline=9.0, max_tokens=100)
    assert where(ask(policy, short, long)) == {"r": ("q0",)}


def test_the_margin_is_what_epsilon_says() -> None:
    assert where(ask(one(epsilon=0.0), *due(0.221))) == {"r": ("q0",)}
    late = ask(one(epsilon=0.1), *due(0.31))
    assert order(late) == ["hopeless"]


def test_the_largest_batch_over_all_adapters_runs_and_the_next_replica_takes_the_next() -> None:
    policy = Shepherd()
    told(policy, view("a", b_limit=8, latency=MODEL), view("b", b_limit=8, latency=MODEL))
    few = [request(f"x{n}", adapter="x", deadline=5.0) for n in range(2)]
    many = [request(f"y{n}", adapter="y", deadline=9.0) for n in range(3)]
    assert where(ask(policy, *few, *many)) == {"a": ("y0", "y1", "y2"), "b": ("x0", "x1")}
    assert policy.queued() == 0
    assert policy.decide(0.1) == []


def test_a_batch_keeps_to_the_limit_of_the_replica_and_to_what_fits() -> None:
    assert where(ask(one(limit=2), *due(None, None, None))) == {"r": ("q0", "q1")}
    policy = Shepherd()
    told(policy, view("r", b_limit=8, context=200, latency=MODEL))
    large = request("large", deadline=2.0, prompt_tokens=500)
    assert where(ask(policy, request("small", deadline=1.0), large, request("late"))) == {
        "r": ("small", "late")
    }, "what comes after one that does not fit need not wait for it"


def test_a_replica_that_runs_a_batch_takes_nothing_more() -> None:
    policy = one()
    ask(policy, request("a"))
    assert ask(policy, request("b"), now=0.2) == []
    assert policy.queued() == 1
    policy.on_completion(done("a"), 0.3)
    assert where(policy.decide(0.3)) == {"r": ("b",)}


def test_without_a_latency_model_anything_is_feasible() -> None:
    policy = Shepherd()
    told(policy, view("r", b_limit=8))
    assert where(ask(policy, *due(0.001, 0.002))) == {"r": ("q0", "q1")}


def test_latencies_are_fitted_from_steps_until_a_coordinator_names_them() -> None:
    policy = Shepherd()
    told(policy, view("r", b_limit=8))
    for n in range(int(NEEDED) + 10):
        prompt = 100 * (n % 2)
        seconds = 0.01 + 0.001 * (n % 5) + prompt * 1e-3
        policy.on_step(
            StepSeen(
                replica="r",
                seconds=seconds,
                steps=1,
                b=n % 5,
                B=0,
                prefill_tokens=prompt,
                decode_tokens=n % 5,
            ),
            0.0,
        )
    assert order(ask(policy, *due(0.01))) == ["hopeless"], "it has learnt that this is too soon"
    policy.on_replica_gone("r", 1.0)
    assert policy.fit.model("r") is not None, "of the others' steps"
    assert policy.fit._own == {}


# ------------------------------------------------------------ preemption


def _running() -> Shepherd:
    """q0 has begun at 0, q1 begins at 0.11."""
    policy = one()
    assert where(ask(policy, *due(None, None))) == {"r": ("q0", "q1")}
    return policy


def _wave(count: int) -> list[Request]:
    return [request(f"w{n}") for n in range(count)]


def test_a_batch_more_than_three_times_as_large_takes_back_what_has_not_begun() -> None:
    policy = _running()
    assert ask(policy, *_wave(6), now=0.05) == [], "6 < 3.03 * 2"
    assert ask(policy, request("w6"), now=0.05) == [Preempt(replica="r", requests=("q1",))]


def test_a_batch_is_looked_at_again_only_when_something_arrives() -> None:
    policy = _running()
    assert taken_back(ask(policy, *_wave(7), now=0.05)) == {"r": ("q1",)}
    assert policy.decide(0.06) == []
    policy.on_completion(done("q1", tokens=0, reason="cancelled"), 0.07)
    assert policy.decide(0.07) == [], "q0 still runs"
    policy.on_completion(done("q0"), 0.3)
    assert len(where(policy.decide(0.3))["r"]) == 7


def test_what_has_begun_is_not_taken_back() -> None:
    assert ask(_running(), *_wave(7), now=0.11) == []
    assert taken_back(ask(_running(), *_wave(7), now=0.1099)) == {"r": ("q1",)}


def test_how_much_larger_is_an_option() -> None:
    policy = one(preempt=2.0)
    ask(policy, *due(None, None))
    assert ask(policy, *_wave(3), now=0.05) == []
    assert taken_back(ask(policy, request("w3"), now=0.05)) == {"r": ("q1",)}


def test_the_replica_with_something_fresh_is_preempted_not_the_one_before_it() -> None:
    policy = Shepherd()
    told(policy, view("a", b_limit=8, latency=MODEL), view("b", b_limit=8, latency=MODEL))
    ask(policy, request("old", adapter="x"), *due(None, None))
    assert {k: len(v) for k, v in where(policy.decide(0.0)).items()} == {}
    assert taken_back(ask(policy, *_wave(8), now=0.05)) == {"a": ("q1",)}
    policy.on_replica_gone("a", 0.06)
    assert policy._begun == {"old": 0.0}


# ------------------------------------------------------------ hopeless requests


def test_hopeless_requests_run_when_a_replica_has_nothing_feasible() -> None:
    policy = one()
    actions = ask(policy, *due(0.1, 0.2), request("fine", deadline=9.0))
    assert where(actions) == {"r": ("fine",)}
    policy.on_completion(done("fine"), 1.0)
    actions = policy.decide(1.0)
    assert where(actions) == {"r": ("q0", "q1")}
    assert order(actions) == ["hopeless"]
    assert policy.queued() == 0


def test_a_batch_of_hopeless_ones_has_its_own_limit_and_leaves_out_who_went() -> None:
    policy = one(limit=64)
    for each in due(*[0.01] * (LATE_BATCH + 3)):
        policy.on_arrival(each, 0.0)
    policy.on_arrival(request("fine"), 0.0)
    assert where(policy.decide(0.0)) == {"r": ("fine",)}
    assert policy.on_cancel("q1", 0.1) is True
    assert policy.on_cancel("q1", 0.1) is False
    policy.on_completion(done("fine"), 1.0)
    keys = ("q0", *(f"q{n}" for n in range(2, LATE_BATCH)), "q10", "q8")
    assert where(policy.decide(1.0)) == {"r": tuple(sorted(keys))[:LATE_BATCH]}
    assert policy.queued() == 2
    narrow = one(limit=3)
    assert where(ask(narrow, *due(0.01, 0.01, 0.01, 0.01))) == {"r": ("q0", "q1", "q2")}


def test_they_are_refused_where_that_is_wanted_once_lengths_are_known() -> None:
    policy = one(on_overload="shed")
    assert order(ask(policy, *due(0.1))) == ["hopeless"], "an estimate is no reason to refuse"
    policy.on_completion(done("q0"), 0.5)
    for _ in range(KNOWN):
        policy.lengths.learn(request(), done(tokens=10))
    assert ask(policy, request("p", arrival=1.0, deadline=1.1), now=1.0) == [
        Shed(request="p", reason="cannot be answered within its latency limits", retry_after=1.0)
    ]
    assert policy.queued() == 0
    assert where(ask(policy, request("q", deadline=9.0), now=1.0)) == {"r": ("q",)}


def test_a_refusal_names_the_time_in_which_the_queue_empties() -> None:
    policy = one(on_overload="shed", limit=1)
    for n in range(KNOWN):
        policy.lengths.learn(request(), done(tokens=10))
        assert where(ask(policy, request(f"r{n}"), now=0.0)) == {"r": (f"r{n}",)}
        policy.on_completion(done(f"r{n}"), 0.0)
    assert where(ask(policy, request("runs"), now=10.0)) == {"r": ("runs",)}
    for n in range(KNOWN + 1):
        assert ask(policy, request(f"w{n}"), now=10.0) == []
    (shed,) = ask(policy, request("p", arrival=20.0, deadline=20.01), now=20.0)
    assert isinstance(shed, Shed)
    assert shed.retry_after == 20.0, "as many wait as left in twenty seconds"


def test_an_unknown_way_to_treat_overload_is_named() -> None:
    with pytest.raises(TypeError, match=r"on_overload: best_effort or shed expected, 'x' given"):
        Shepherd(on_overload="x")


# ------------------------------------------------------------ books


def test_ended_answers_teach_their_length() -> None:
    policy = one()
    for n in range(KNOWN):
        ask(policy, request(f"q{n}", max_tokens=500))
        policy.on_completion(done(f"q{n}", tokens=3), 0.0)
    policy.on_completion(done("unknown", tokens=400), 0.0)
    assert policy.lengths.expect(request(max_tokens=500)) == 3
    assert policy._begun == {}


def test_without_a_serving_replica_one_is_promoted() -> None:
    policy = Shepherd()
    idle = {"dispatchable": False, "idle": True}
    told(policy, view("b", **idle), view("a", **idle))
    assert policy.decide(0.0) == []
    assert ask(policy, request()) == [Promote(replica="a")]
    assert policy.next_wake(0.0) is None


def test_what_runs_since_before_a_restart_keeps_its_replica_busy() -> None:
    policy = one()
    policy.restore("r", (request("old"),), 0.0)
    policy.restore("unknown", (request("lost"),), 0.0)
    assert ask(policy, request("new")) == []
    policy.on_completion(done("old"), 1.0)
    assert where(policy.decide(1.0)) == {"r": ("new",)}


@pytest.mark.parametrize(
    ("limits", "before"),
    [
        ({"ttft_deadline": 2.0}, 2.5),  # no pace: its first token is all that is due
        ({"ttft_deadline": 2.0, "tpot": 0.1}, 3.5),  # 2 + 10 tokens of 0.1 s
        ({"ttft_deadline": 2.0, "deadline": 4.0}, 4.5),
        ({"tpot": 0.1}, 1e6),
    ],
)
def test_one_deadline_a_request_decides_the_order(limits: dict[str, float], before: float) -> None:
    policy = one(limit=8)
    actions = ask(policy, request("after", deadline=before), request("limited", **limits))
    first, second = where(actions)["r"]
    assert (first, second) == (("limited", "after") if before < 1e6 else ("after", "limited")), (
        "by deadline"
    )
    policy = one(limit=8)
    actions = ask(policy, request("early", deadline=before - 1.0), request("limited", **limits))
    assert where(actions)["r"] == ("early", "limited")


# ------------------------------------------------------------ what does not fit


def test_one_that_another_replica_must_take_does_not_end_the_batch() -> None:
    policy = Shepherd()
    told(policy, view("r", b_limit=8, context=200, latency=MODEL))
    told(policy, view("s", b_limit=0, latency=MODEL))
    large = request("large", deadline=8.0, prompt_tokens=1000)
    assert where(ask(policy, large, *due(9.0, 9.0))) == {"r": ("q0", "q1")}


def test_one_that_no_serving_replica_could_hold_waits_apart_and_has_one_promoted() -> None:
    policy = Shepherd()
    told(policy, view("r", b_limit=8, context=200, latency=MODEL))
    large = request("large", deadline=8.0, prompt_tokens=1000)
    assert where(ask(policy, request("q"), large)) == {"r": ("q",)}
    told(policy, view("i", dispatchable=False, idle=True, context=2000, latency=MODEL))
    assert policy.decide(0.1) == [Promote(replica="i", why={"holds_tokens": 1010})]
    assert policy.queued() == 1
    told(policy, view("i", context=2000, latency=MODEL))
    assert where(policy.decide(0.2)) == {"i": ("large",)}
    assert policy.queued() == 0
    policy.on_replica_gone("i", 0.3)
    assert where(ask(policy, request("more", prompt_tokens=1000), now=0.3)) == {}
    policy.decide(0.3)
    assert policy.on_cancel("more", 0.4)
    assert policy.queued() == 0


def test_a_hopeless_one_goes_where_it_fits() -> None:
    policy = Shepherd()
    told(policy, view("r", b_limit=8, context=200, latency=MODEL))
    told(policy, view("s", b_limit=8, context=2000, latency=MODEL))
    large = request("large", deadline=0.01, prompt_tokens=1000)
    assert where(ask(policy, large, *due(0.01))) == {"r": ("q0",), "s": ("large",)}
