"""The simple policies, decision by decision: order of arrival, credit, which replica."""

from __future__ import annotations

from typing import Any

import pytest

from services.dispatcher.policies.base import Promote, Release, StepSeen
from services.dispatcher.policies.fcfs import PASSED_OVER_MAX
from services.dispatcher.policies.fleet import Fleet, Member
from services.dispatcher.policies.least_loaded import LeastLoaded
from services.dispatcher.policies.peft import Peft
from services.dispatcher.policies.round_robin import RoundRobin
from services.dispatcher.policies.split import Split
from tests.dispatcher.made import ask, done, request, told, view, where

# ------------------------------------------------------------ books


def test_a_member_counts_what_is_in_flight() -> None:
    fleet = Fleet()
    member = fleet.tell(view("r", b_limit=3))
    assert (member.load, member.credit) == (0, 3)
    fleet.assign(member, (request("a"), request("b", prompt_tokens=7, max_tokens=1)))
    assert (member.load, member.credit) == (2, 1)
    ended = fleet.finish(done("a"))
    assert ended is not None
    assert (ended[0], ended[1].id) == (member, "a")
    assert member.load == 1
    assert fleet.finish(done("a")) is None, "it ended already"
    assert fleet.finish(done("b", replica="another")) is None, "it is not in flight there"
    assert member.load == 1


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({}, True),
        ({"context": 110}, True),
        ({"context": 109}, False),
        ({"kv_total": 110}, True),
        ({"kv_total": 109}, False),
        ({"context": 200, "kv_total": 109}, False),
        ({"context": 1}, False),
        ({"kv_total": 1}, False),
    ],
)
def test_a_request_fits_where_context_and_memory_hold_it(
    limits: dict[str, int], fits: bool
) -> None:
    assert Member(view(**limits)).fits(request()) is fits


def test_the_base_is_held_everywhere_and_an_adapter_where_it_is_resident() -> None:
    member = Member(view(adapters={"x": "1"}))
    assert member.holds(request())
    assert member.holds(request(adapter="x"))
    assert not member.holds(request(adapter="y"))


def test_the_fleet_keeps_order_of_id_and_what_is_in_flight_through_changes() -> None:
    fleet = Fleet()
    fleet.tell(view("b"))
    fleet.tell(view("a", dispatchable=False, idle=True))
    fleet.assign(fleet["b"], (request(),))
    assert fleet.tell(view("b", b_limit=9)) is fleet["b"]
    assert ([m.view.id for m in fleet], len(fleet)) == (["a", "b"], 2)
    assert (fleet["b"].load, fleet["b"].credit) == (1, 8)
    assert "a" in fleet
    assert "c" not in fleet
    assert (fleet.get("c"), fleet.get("a")) == (None, fleet["a"])
    assert [m.view.id for m in fleet.dispatchable()] == ["b"]
    assert [m.view.id for m in fleet.idle()] == ["a"]


def test_what_was_on_a_lost_replica_is_not_in_flight_any_more() -> None:
    fleet = Fleet()
    fleet.assign(fleet.tell(view("r")), (request("a"), request("b")))
    assert [r.id for r in fleet.drop("r")] == ["a", "b"]
    assert fleet.drop("r") == []
    fleet.tell(view("r"))
    assert fleet.finish(done("a")) is None


# ------------------------------------------------------------ the frame


def test_requests_go_out_in_order_of_arrival_as_far_as_credit_reaches() -> None:
    policy = LeastLoaded()
    told(policy, view("r", b_limit=2))
    (release,) = ask(policy, request("a"), request("b"), request("c"))
    assert isinstance(release, Release)
    assert (release.replica, release.requests) == ("r", ("a", "b"))
    assert release.why == {"in_flight": 2, "limit": 2}
    assert policy.queued() == 1
    assert policy.decide(0.1) == [], "no credit"
    policy.on_completion(done("a"), 0.2)
    assert where(policy.decide(0.2)) == {"r": ("c",)}
    assert policy.queued() == 0
    assert policy.decide(0.3) == []
    assert policy.next_wake(0.3) is None


def test_a_replica_that_is_full_takes_no_part_in_the_rest_of_the_decision() -> None:
    policy = LeastLoaded()
    told(policy, view("a", b_limit=1), view("b", b_limit=3))
    assert where(ask(policy, *(request(f"q{n}") for n in range(9)))) == {
        "a": ("q0",),
        "b": ("q1", "q2", "q3"),
    }
    assert policy.queued() == 5


def test_a_cancelled_request_is_not_released() -> None:
    policy = LeastLoaded()
    policy.on_arrival(request("a"), 0.0)
    assert policy.on_cancel("a", 0.0) is True
    assert policy.on_cancel("a", 0.0) is False
    told(policy, view())
    assert policy.decide(0.0) == []


def test_without_a_serving_replica_one_idle_replica_is_promoted() -> None:
    policy = LeastLoaded()
    idle = {"dispatchable": False, "idle": True}
    told(policy, view("b", **idle), view("a", **idle), view("c", dispatchable=False))
    assert ask(policy, request("q"), request("p")) == [Promote(replica="a", why={"queued": 2})]
    told(policy, view("c"))
    assert where(policy.decide(0.0)) == {"c": ("q", "p")}, "nobody is promoted then"


def test_one_that_fits_no_replica_with_credit_is_passed_over_and_only_so_many_are() -> None:
    policy = LeastLoaded()
    told(policy, view("small", context=200), view("large", b_limit=0))
    large = [request(f"large{n}", prompt_tokens=1000) for n in range(PASSED_OVER_MAX)]
    assert where(ask(policy, *large, request("q"))) == {"small": ("q",)}
    assert policy.queued() == PASSED_OVER_MAX
    more = request("one more", prompt_tokens=1000)
    assert where(ask(policy, more, request("late"))) == {}, "too many before it"
    assert policy.queued() == PASSED_OVER_MAX + 2


def test_any_number_that_no_serving_replica_could_hold_waits_apart() -> None:
    policy = LeastLoaded()
    told(policy, view("small", context=200))
    large = [request(f"large{n}", prompt_tokens=1000) for n in range(2 * PASSED_OVER_MAX)]
    assert where(ask(policy, *large, request("q"))) == {"small": ("q",)}
    assert policy.queued() == 2 * PASSED_OVER_MAX
    assert policy.on_cancel("large0", 0.0) is True
    assert policy.on_cancel("large0", 0.0) is False
    idle = {"dispatchable": False, "idle": True}
    told(policy, view("a", context=900, **idle), view("b", context=2000, **idle))
    assert policy.decide(0.0) == [Promote(replica="b", why={"holds_tokens": 1010})]
    told(policy, view("b", context=2000))
    assert where(ask(policy, request("new", arrival=1.0, prompt_tokens=1000))) == {
        "b": ("large1", "large2")
    }
    assert policy.queued() == 2 * PASSED_OVER_MAX - 2


def test_when_nobody_serves_the_one_that_is_promoted_holds_the_oldest() -> None:
    policy = LeastLoaded()
    idle = {"dispatchable": False, "idle": True}
    told(policy, view("a", context=900, **idle), view("b", context=2000, **idle))
    actions = ask(policy, request("large", prompt_tokens=1000))
    assert actions == [Promote(replica="b", why={"queued": 1})]


def test_a_replica_that_holds_the_adapter_comes_first_if_it_has_credit() -> None:
    policy = LeastLoaded()
    told(policy, view("a"), view("b", b_limit=2, adapters={"x": "1"}))
    asked = [request(f"q{n}", adapter="x") for n in range(3)]
    assert where(ask(policy, *asked)) == {"b": ("q0", "q1"), "a": ("q2",)}


def test_what_is_in_flight_after_a_restart_takes_its_credit() -> None:
    policy = LeastLoaded()
    told(policy, view(b_limit=2))
    policy.restore("r", (request("a"),), 0.0)
    policy.restore("unknown", (request("b"),), 0.0)
    assert where(ask(policy, request("c"), request("d"))) == {"r": ("c",)}
    policy.on_completion(done("a"), 0.1)
    assert where(policy.decide(0.1)) == {"r": ("d",)}


def test_a_lost_replica_receives_nothing() -> None:
    policy = LeastLoaded()
    told(policy, view("a"), view("b"))
    policy.on_replica_gone("a", 0.0)
    assert where(ask(policy, request("q"))) == {"b": ("q",)}


def test_steps_are_of_no_interest_to_it() -> None:
    policy = LeastLoaded()
    step = StepSeen(replica="r", seconds=1.0, steps=1, b=1, B=0, prefill_tokens=1, decode_tokens=1)
    policy.on_step(step, 0.0)
    assert policy.queued() == 0


# ------------------------------------------------------------ which replica


def test_least_loaded_goes_by_the_share_of_the_limit() -> None:
    policy = LeastLoaded()
    told(policy, view("a", b_limit=2), view("b", b_limit=8))
    assert where(ask(policy, *(request(f"q{n}") for n in range(6)))) == {
        "a": ("q0", "q5"),  # 1/2 only once b has 4/8
        "b": ("q1", "q2", "q3", "q4"),
    }


def test_a_limit_of_nothing_divides_by_nothing() -> None:
    policy = LeastLoaded()
    empty = Member(view("a", b_limit=0))
    half = Member(view("b", b_limit=2))
    half.flight["q"] = request()
    assert policy.choose(request(), [half, empty]) is empty
    empty.flight["q"] = request()
    assert policy.choose(request(), [empty, half]) is half


def test_round_robin_goes_on_after_the_last_and_skips_what_is_full() -> None:
    policy = RoundRobin()
    told(policy, view("a", b_limit=1), view("b", b_limit=2), view("c", b_limit=2))
    asked = [request(f"q{n}") for n in range(5)]
    assert where(ask(policy, *asked)) == {"a": ("q0",), "b": ("q1", "q3"), "c": ("q2", "q4")}
    policy.on_completion(done("q0", "a"), 1.0)
    policy.on_completion(done("q1", "b"), 1.0)
    assert where(ask(policy, request("next"), now=1.0)) == {"a": ("next",)}, "c was last"


def test_peft_fills_an_empty_replica_and_adds_nothing_until_its_batch_is_done() -> None:
    policy = Peft(batch=2)
    told(policy, view("a", b_limit=4), view("b", b_limit=1))
    released = where(ask(policy, *(request(f"q{n}") for n in range(5))))
    assert released == {"a": ("q0", "q1"), "b": ("q2",)}
    policy.on_completion(done("q0", "a"), 1.0)
    assert policy.decide(1.0) == [], "the batch is not done"
    policy.on_completion(done("q1", "a"), 2.0)
    assert where(policy.decide(2.0)) == {"a": ("q3", "q4")}


def test_pefts_batch_is_eight_unless_another_is_named() -> None:
    policy = Peft()
    told(policy, view(b_limit=64))
    assert len(where(ask(policy, *(request(f"q{n}") for n in range(20))))["r"]) == 8


@pytest.mark.parametrize(("serving", "used"), [(1, {"a"}), (2, {"a", "b"}), (0, {"a", "b"})])
def test_split_serves_on_the_first_replicas_only(serving: int, used: set[str]) -> None:
    policy = Split(serving=serving)
    told(policy, view("a"), view("b"), view("c"))
    assert set(where(ask(policy, *(request(f"q{n}") for n in range(9))))) == used


def test_split_of_two_replicas_serves_on_one() -> None:
    policy = Split()
    told(policy, view("a"), view("b"))
    assert set(where(ask(policy, *(request(f"q{n}") for n in range(9))))) == {"a"}


def test_split_promotes_within_its_own_part_only() -> None:
    policy = Split()
    idle = {"dispatchable": False, "idle": True}
    told(policy, view("a", **idle), view("b"))
    assert ask(policy, request("q")) == [Promote(replica="a", why={"queued": 1})]
    told(policy, view("a", context=50), view("b", **idle))
    assert policy.decide(0.0) == [], "b is there to train"


IDLE: dict[str, Any] = {"dispatchable": False, "idle": True}


@pytest.mark.parametrize("training", ["combined", "serving", "idle"])
def test_split_promotes_in_its_serving_part_whatever_the_other_does(training: str) -> None:
    policy = Split()
    state = IDLE if training == "idle" else {"training": training == "combined"}
    told(policy, view("a", **IDLE), view("b", **state))
    assert ask(policy, request("q")) == [Promote(replica="a", why={"queued": 1})]
    told(policy, view("a"))
    assert where(policy.decide(0.0)) == {"a": ("q",)}
    assert ask(policy, request("p"), request("o"), now=1.0) != []
    told(policy, view("a", **IDLE))
    policy.on_replica_gone("a", 2.0)
    policy = Split(training=("b",))
    told(policy, view("b", **IDLE))
    assert ask(policy, request("q")) == [], "one that only trains is never promoted"


def test_split_serves_on_all_but_those_that_are_named() -> None:
    policy = Split(training=("a", "elsewhere"))
    told(policy, view("a"), view("b"), view("c"))
    assert set(where(ask(policy, *(request(f"q{n}") for n in range(9))))) == {"b", "c"}


def test_split_of_one_replica_serves_on_it() -> None:
    policy = Split()
    told(policy, view("a"))
    policy.on_arrival(request("q"), 0.0)
    assert where(policy.decide(0.0)) == {"a": ("q",)}
    with pytest.raises(TypeError, match=r"serving: 0 or more replicas expected, -1 given"):
        Split(serving=-1)
