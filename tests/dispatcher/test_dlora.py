"""dLoRA: where an adapter's request costs least, and when requests move."""

from __future__ import annotations

from services.dispatcher.policies.dlora import IMBALANCE, MOVED_MAX, PERIOD_SECONDS, Dlora
from services.dispatcher.policies.fleet import Member
from tests.dispatcher.made import ask, done, request, taken_back, told, view, where


def test_a_request_goes_where_it_completes_a_batch_of_its_adapter() -> None:
    """Batches of 2: beside one of its own it makes 0.6, beside one of another 1."""
    policy = Dlora(batch=2)
    told(policy, view("a", b_limit=8), view("b", b_limit=8))
    assert where(ask(policy, request("x1", adapter="x"))) == {"a": ("x1",)}
    assert where(ask(policy, request("y1", adapter="y"))) == {"b": ("y1",)}
    assert where(ask(policy, request("y2", adapter="y"))) == {"b": ("y2",)}, "0.6 beats 1"
    assert where(ask(policy, request("x2", adapter="x"))) == {"a": ("x2",)}


def test_the_cost_counts_full_batches_and_what_is_left_of_all_adapters() -> None:
    policy = Dlora(batch=4)
    member = Member(view("a"))
    policy._counts["a"] = {"x": 7, "y": 3, None: 1}
    # with one more: x 8 = 2 full; 3 + 1 left make one batch
    assert policy._cost(member, "x") == 0.6 * 2 + 1
    # y 4 = 1 full, x 1 full and 3 left, with the base's 1 one batch
    assert policy._cost(member, "y") == 0.6 * 2 + 1
    # a new adapter: x 1 full; 3 + 3 + 1 + 1 left make two
    assert policy._cost(member, "z") == 0.6 + 2
    assert policy._counts["a"] == {"x": 7, "y": 3, None: 1}, "asking changes nothing"
    policy._counts["a"] = {"x": 3, "y": 1}
    assert policy._cost(member, "y") == 1, "five that are left are one batch and a fourth of one"


def test_equal_costs_go_to_the_replica_with_fewer_requests() -> None:
    policy = Dlora()
    told(policy, view("a", b_limit=8), view("b", b_limit=8))
    policy.restore("a", (request("old", adapter="x"),), 0.0)
    policy.restore("unknown", (request("lost"),), 0.0)
    assert policy._counts == {"a": {"x": 1}}
    assert where(ask(policy, request("new"))) == {"b": ("new",)}


def test_what_ended_or_was_lost_no_longer_counts() -> None:
    policy = Dlora(batch=2)
    told(policy, view("a", b_limit=8))
    ask(policy, *(request(f"q{n}", adapter="x") for n in range(3)))
    assert policy._counts == {"a": {"x": 3}}
    policy.on_completion(done("q0", "a"), 0.1)
    policy.on_completion(done("q0", "a"), 0.1)
    policy.on_completion(done("nobody", "a"), 0.1)
    assert policy._counts == {"a": {"x": 2}}
    for key in ("q1", "q2"):
        policy.on_completion(done(key, "a"), 0.2)
    assert policy._counts == {"a": {}}
    policy.on_replica_gone("a", 0.3)
    assert policy._counts == {}
    assert "a" not in policy.fleet


def test_batches_are_of_32_unless_another_size_is_named() -> None:
    policy = Dlora()
    policy._counts["a"] = {"x": 31}
    assert policy._cost(Member(view("a")), "x") == 0.6
    assert policy._cost(Member(view("a")), "y") == 1


def _unequal(busy: int, calm: int = 0) -> Dlora:
    """Replicas a and b with so many requests in flight; b's limit is 0 so that it stays so."""
    policy = Dlora()
    told(policy, view("a", b_limit=0), view("b", b_limit=0))
    policy.restore("a", [request(f"a{n}") for n in range(busy)], 0.0)
    policy.restore("b", [request(f"b{n}") for n in range(calm)], 0.0)
    return policy


def test_the_newest_requests_move_off_the_busiest_replica_every_ten_seconds() -> None:
    policy = _unequal(2 * IMBALANCE)
    assert policy.next_wake(0.0) is None
    assert policy.decide(5.0) == [], "the first decision begins the period"
    assert policy.next_wake(5.0) == 5.0 + PERIOD_SECONDS
    assert policy.decide(14.99) == []
    moved = taken_back(policy.decide(15.0))
    assert moved == {"a": tuple(f"a{n}" for n in range(IMBALANCE, 2 * IMBALANCE))}
    assert policy.next_wake(15.0) == 25.0
    assert policy.decide(20.0) == []
    assert list(taken_back(policy.decide(25.0))) == ["a"]


def test_a_migration_holds_up_no_release() -> None:
    policy = _unequal(3 * IMBALANCE)
    policy.decide(0.0)
    told(policy, view("b", b_limit=1))
    actions = ask(policy, request("new"), now=PERIOD_SECONDS)
    assert where(actions) == {"b": ("new",)}
    assert list(taken_back(actions)) == ["a"]


def test_less_than_16_above_the_mean_stays() -> None:
    policy = _unequal(2 * IMBALANCE - 1)
    policy.decide(0.0)
    assert policy.decide(PERIOD_SECONDS) == []


def test_half_the_difference_moves_and_at_most_64() -> None:
    policy = _unequal(60, 10)
    policy.decide(0.0)
    assert len(taken_back(policy.decide(PERIOD_SECONDS))["a"]) == 25
    policy = _unequal(200)
    policy.decide(0.0)
    assert len(taken_back(policy.decide(PERIOD_SECONDS))["a"]) == MOVED_MAX


def test_one_replica_moves_nothing() -> None:
    policy = Dlora()
    told(policy, view("a", b_limit=0), view("b", dispatchable=False))
    policy.restore("a", [request(f"a{n}") for n in range(99)], 0.0)
    policy.decide(0.0)
    assert policy.decide(PERIOD_SECONDS) == []
