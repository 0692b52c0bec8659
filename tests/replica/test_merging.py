"""dLoRA's rule: when an adapter is merged, who waits for it, and for how long at most."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.replica.merging import PATIENCE, Choice, Merging

SPEEDUP = 1.8
X10 = ["x"] * 10


def rule(**changes: Any) -> Merging:
    """The artifact's times: 27 ms unmerged, 15 ms merged, 20 ms for a switch."""
    values = {"speedup": SPEEDUP, "switch": 0.02, "seconds": lambda b: 0.027, "capacity": 64}
    return Merging(**{**values, **changes})


def names(queue: list[Any], choice: Choice) -> list[Any]:
    return [queue[place] for place in choice.batch]


def times(made: Merging, queue: list[Any], count: int, b: int = 16) -> None:
    for _ in range(count):
        made.decide(queue, b)


# ------------------------------------------------------------ merged or not


def test_an_adapter_alone_is_merged_at_once_and_switches_once() -> None:
    made = rule()
    first, second = made.decide(X10, 4), made.decide(X10, 4)
    assert first == Choice((0, 1, 2, 3), "x", switched=True, steady=False)
    assert second == Choice((0, 1, 2, 3), "x", switched=False, steady=True)


def test_a_mixed_queue_runs_unmerged_in_order_of_arrival() -> None:
    choice = rule().decide(["x", "y", "x", "z", "x"], 4)
    assert choice.batch == (0, 1, 2, 3)
    assert choice.merged is None


def test_merged_is_left_at_a_smaller_share_than_it_is_entered_at() -> None:
    six, five = ["x"] * 6 + ["y"] * 4, ["x"] * 5 + ["y"] * 5
    made = rule()
    times(made, X10, 20)
    stays = made.decide(six, 16)
    assert (stays.merged, names(six, stays)) == ("x", ["x"] * 6)
    left = made.decide(five, 16)
    assert (left.merged, left.switched, len(left.batch)) == (None, True, 10)
    again = made.decide(six, 16)
    assert (again.merged, again.switched) == (None, False)


def test_the_longest_queue_counts_as_a_whole_also_beyond_the_batch() -> None:
    queue = ["y", "y", *["x"] * 20]
    choice = rule().decide(queue, 4)
    assert (choice.merged, choice.batch) == ("x", (2, 3, 4, 5))


def test_another_adapter_replaces_the_merged_one_in_a_single_switch() -> None:
    made = rule()
    times(made, X10, 3)
    choice = made.decide(["y"] * 5, 16)
    assert (choice.merged, choice.switched) == ("y", True)


def test_no_more_adapters_run_than_fit_and_the_base_needs_no_place() -> None:
    queue = ["a", None, "b", "c", "a"]
    assert rule(capacity=2).decide(queue, 16).batch == (0, 1, 2, 4)


def test_requests_without_an_adapter_displace_nobody() -> None:
    made = rule()
    choices = [made.decide([None] * 9 + ["x"], 16) for _ in range(100)]
    choices += [made.decide([None] * 9, 16) for _ in range(3)]
    assert {c.merged for c in choices} == {None}
    assert not any(c.switched for c in choices)
    assert set(made.credit.values()) == {0.0}


# ------------------------------------------------------------ ledger and guard


def test_a_jump_while_merged_costs_what_it_gains() -> None:
    made = rule()
    made.decide(["y", "y", *["x"] * 20], 4)
    assert made.credit == {"x": pytest.approx(-2 * SPEEDUP), "y": pytest.approx(2 * SPEEDUP)}


def test_half_of_it_where_the_batch_is_smaller_than_what_was_displaced() -> None:
    made = rule()
    times(made, X10, 5)
    made.decide([*X10, "y", "z"], 16)
    half = SPEEDUP / 2
    assert made.credit == {"x": pytest.approx(-2 * half), "y": half, "z": half}


def test_who_waits_for_a_merged_adapter_comes_first_in_the_end() -> None:
    made, queue, waited = rule(), [*X10, "y"], 0
    times(made, X10, 5)
    while 10 not in (choice := made.decide(queue, 16)).batch:
        waited += 1
    assert waited == 36  # PATIENCE at 0.9 a time
    assert waited <= 2 * PATIENCE / SPEEDUP + 1
    assert choice.merged is None
    assert len(choice.batch) == 11


def test_who_was_let_in_first_stays_until_half_of_the_credit_is_spent() -> None:
    made, queue = rule(), [*["x"] * 8, "y"]
    made.credit = {"x": -PATIENCE - 1, "y": PATIENCE + 1}
    first = 0
    while 8 in made.decide(queue, 4).batch:
        first += 1
        assert made.credit["y"] == pytest.approx(PATIENCE + 1 - first), "a jump costs one"
    assert first == PATIENCE / 2 + 2
    assert made.credit["y"] < PATIENCE, "else it would come first again"


def test_a_debt_stays_when_the_debtor_leaves_and_is_forgiven_with_the_creditor() -> None:
    made = rule()
    made.credit = {"x": -6.0, "y": 4.0, "z": 2.0}
    made.decide(["y", "z"], 16)
    assert (made.credit, made.gone) == ({"y": 4.0, "z": 2.0}, -6.0)
    made.decide(["z"], 16)
    assert made.credit == {"z": 2.0}
    assert made.gone == pytest.approx(-2.0)
    made.decide([], 16)
    assert (made.credit, made.gone) == ({}, pytest.approx(0.0))


# ------------------------------------------------------------ thresholds


def test_a_merged_period_that_paid_merges_sooner() -> None:
    made = rule()
    times(made, X10, 50)
    made.decide(["x"] * 5 + ["y"] * 5, 16)
    assert (made.alpha, made.beta) == (pytest.approx(0.95), pytest.approx(1 / SPEEDUP))


def test_a_merged_period_too_short_for_its_switch_merges_later() -> None:
    made = rule()
    times(made, X10, 1)
    made.decide(["x"] * 5 + ["y"] * 5, 16)
    assert made.alpha == pytest.approx(1.1)


def test_an_unmerged_period_that_paid_leaves_merged_sooner() -> None:
    made = rule()
    times(made, ["x"] * 5 + ["y"] * 5, 100)
    made.decide(X10, 16)
    assert (made.alpha, made.beta) == (1.0, pytest.approx(1 / SPEEDUP + 0.05))


def test_an_unmerged_period_in_which_merging_would_have_paid_leaves_it_later() -> None:
    made = rule()
    times(made, ["x"] * 9 + ["y"], 100)
    made.decide(X10, 16)
    assert (made.alpha, made.beta) == (1.0, pytest.approx(1 / SPEEDUP / 1.1))


def test_where_most_requests_have_no_adapter_merging_would_have_gained_nothing() -> None:
    made = rule()
    times(made, [None] * 9 + ["x"], 100)
    made.decide(X10, 16)
    assert made.beta == pytest.approx(1 / SPEEDUP + 0.05)


def test_merging_would_have_paid_a_switch_for_each_change_of_the_largest_queue() -> None:
    made = rule()
    for _ in range(50):
        made.decide(["x"] * 9 + ["y"], 16)
        made.decide(["y"] * 9 + ["x"], 16)
    made.decide(X10, 16)
    assert made.beta > 1 / SPEEDUP


def test_an_adapter_alone_is_merged_whatever_the_threshold_has_become() -> None:
    made = rule()
    for _ in range(20):
        made.decide(["x"], 16)
        made.decide(["x", "y"], 16)
    assert made.alpha > 1.5
    assert made.decide(["x"], 16).merged == "x"


# ------------------------------------------------------------ any queue

adapters = st.sampled_from([None, "x", "y", "z", "w"])
queues = st.lists(st.lists(adapters, max_size=14), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(queues, st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_whatever_comes_credit_adds_up_and_batches_keep_to_their_limits(
    found: list[list[Any]], b: int, capacity: int, patience: int
) -> None:
    made = rule(capacity=capacity, patience=float(patience))
    for queue in found:
        for _ in range(3):
            choice = made.decide(queue, b)
            batch = names(queue, choice)
            assert sum(made.credit.values()) + made.gone == pytest.approx(0.0, abs=1e-6)
            assert made.gone <= 1e-9
            assert set(made.credit) == set(queue)
            assert list(choice.batch) == sorted(set(choice.batch))
            assert bool(batch) == bool(queue)
            assert len(batch) <= b
            if choice.merged is not None:
                assert set(batch) == {choice.merged}
            assert len(set(batch) - {None}) <= capacity
            assert made.beta < made.alpha


@settings(max_examples=200, deadline=None)
@given(queues, st.integers(1, 6), st.integers(1, 12))
def test_a_steady_choice_is_made_again(found: list[list[Any]], b: int, patience: int) -> None:
    once, again = rule(patience=float(patience)), rule(patience=float(patience))
    for queue in found:
        for _ in range(4):
            choice = once.decide(queue, b)
            assert again.decide(queue, b) == choice
            if choice.steady:
                for _ in range(3):
                    assert once.decide(queue, b) == choice
                again.repeated(3)
            assert (once.alpha, once.beta) == (again.alpha, again.beta)
            assert once.credit == again.credit


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(adapters, st.integers(1, 8)), max_size=60),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 200),
)
def test_nobody_starves_in_a_flood_of_what_is_merged(
    arrivals: list[tuple[Any, int]], b: int, capacity: int, flood: int
) -> None:
    """Each iteration something else comes, and for ``flood`` iterations more of what is merged."""
    patience = 4.0
    made = rule(capacity=capacity, patience=patience)
    queue: list[list[Any]] = [["rare", 5]]  # adapter, iterations left
    oldest, waited, longest = queue[0], 0, 0
    pending = list(reversed(arrivals))
    for _ in range(5000):
        if not queue:
            break
        choice = made.decide([one[0] for one in queue], b)
        ran = [queue[place] for place in choice.batch]
        waited = 0 if queue[0] is not oldest or queue[0] in ran else waited + 1
        oldest, longest = queue[0], max(longest, waited)
        for one in ran:
            one[1] -= 1
        queue = [one for one in queue if one[1] > 0]
        if pending:
            queue.append(list(pending.pop()))
        if flood > 0:
            flood -= 1
            queue += [[choice.merged, 2] for _ in range(b)]
    assert not queue, "everything is served"
    assert longest <= 6 * 2 * patience, "six adapters, each a unit, at least half of one a time"
