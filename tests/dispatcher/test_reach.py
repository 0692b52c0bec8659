"""What requests could get of an empty replica, when training rests, how fast a queue empties."""

from __future__ import annotations

import math
from itertools import permutations
from types import SimpleNamespace
from typing import cast

import pytest

from services.dispatcher.policies.base import Suspend
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.outflow import SECONDS, Outflow
from services.dispatcher.policies.parts.reach import FRONT_MAX, Reach
from services.dispatcher.policies.parts.rest import QUIET_SECONDS, SUSPEND_AGAIN, Rest
from services.dispatcher.policies.parts.waiting import Waiting
from tests.dispatcher.made import request

NOW = 3.0


def lane(token: float, prompt: float, chunk: float, size: float = 1e3, slow: float = 1.0) -> Lane:
    """Seconds: a token of one request, a prompt token, a step with a prompt."""
    return cast(
        Lane,
        SimpleNamespace(
            alpha0=0.75 * token,
            alpha1=0.25 * token,
            pi1=prompt,
            pi0=chunk,
            bias=2.0 * slow,
            pace=0.5,
            size=size,
        ),
    )


def reach(*lanes: Lane) -> Reach:
    found = Reach()
    found.renew(lanes)
    return found


def waiting(output: float = 10.0, **more: object) -> Waiting:
    return Waiting(request("q", **more), output, 1.0, 5.0, 0.0)


def test_while_there_is_no_replica_nothing_is_out_of_reach() -> None:
    for none in (Reach(), reach()):
        assert none.largest == math.inf
        assert none.keeps(waiting(deadline=NOW), NOW)


def test_the_largest_replica_counts() -> None:
    assert reach(lane(1, 1, 1, 5.0), lane(1, 1, 1, 7.0), lane(1, 1, 1, 6.0)).largest == 7.0


# 100 prompt tokens in one step: 0.2 + 0.04 s to the first token, then ten of 0.1 s: 1.24 s.
@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, True),
        ({"deadline": NOW + 1.25}, True),
        ({"deadline": NOW + 1.23}, False),
        ({"ttft_deadline": NOW + 0.25}, True),
        ({"ttft_deadline": NOW + 0.23}, False),
        ({"tpot": 0.1001}, True),
        ({"tpot": 0.0999}, False),
        ({"tpot": 0.0999, "output": 1.0}, True),  # one token has no pace
        ({"tpot": 0.0999, "output": 2.0}, False),
        ({"deadline": NOW + 1.25, "prompt_tokens": 200}, False),
    ],
)
def test_a_limit_is_kept_or_not_by_a_step_or_two(limits: dict[str, float], kept: bool) -> None:
    assert reach(lane(0.1, 0.002, 0.04)).keeps(waiting(**limits), NOW) is kept
    assert reach(lane(0.05, 0.001, 0.02, slow=2.0)).keeps(waiting(**limits), NOW) is kept


def test_ease_is_a_share_of_the_time_it_takes() -> None:
    one = reach(lane(0.1, 0.002, 0.04))
    for ease, enough in ((0.0, 1.24), (0.5, 1.86), (-0.5, 0.62)):
        assert one.keeps(waiting(deadline=NOW + enough + 0.01), NOW, ease)
        assert not one.keeps(waiting(deadline=NOW + enough - 0.01), NOW, ease)
    assert not one.keeps(waiting(tpot=0.0999), NOW, -0.5)  # a pace is taken as predicted


def test_each_replica_is_taken_for_itself_whatever_the_order() -> None:
    quick_tokens, quick_prompts = lane(0.01, 0.01, 0.01), lane(0.1, 0.001, 0.01)
    worse = lane(0.1, 0.01, 0.02)
    for lanes in permutations((quick_tokens, quick_prompts, worse)):
        found = reach(*lanes)
        long_answer = waiting(100.0, deadline=NOW + 2.1)  # 1.01 + 1.0 s of the first
        long_prompt = waiting(5.0, deadline=NOW + 1.6, prompt_tokens=1000)  # 1.02 + 0.5: the second
        assert found.keeps(long_answer, NOW)
        assert found.keeps(long_prompt, NOW)
        assert not found.keeps(waiting(100.0, deadline=NOW + 1.2), NOW)  # the best of both
    for step in (0.01, 0.03):  # what is slower in steps with prompts alone is slower
        assert reach(lane(0.1, 0.01, 0.01), lane(0.1, 0.01, step)).keeps(
            waiting(1.0, deadline=NOW + 1.12), NOW
        )


def test_of_many_kinds_the_best_of_each_number_is_taken_for_one() -> None:
    kinds = [lane(0.01 * (k + 1), 0.01 / (k + 1), 0.01) for k in range(FRONT_MAX + 1)]
    both = waiting(100.0, deadline=NOW + 1.2)  # 1.0 s of the quickest tokens, 0.1 of prompt
    assert not reach(*kinds[:FRONT_MAX]).keeps(both, NOW)
    assert reach(*kinds).keeps(both, NOW)


# ---------------------------------------------------------------- training that gives way


def ask(rest: Rest, now: float, *, late: bool = True, need: float = 2.0) -> list[object]:
    return list(rest.ask(("a", "b"), late=late, capacity=1.0, need=need, now=now))


STOP, GO = (Suspend(replicas=("a", "b"), wanted=w) for w in (True, False))


def test_training_is_asked_to_rest_when_requests_are_late_and_all_replicas_too_few() -> None:
    assert ask(Rest(), 0.0, late=False) == []
    assert ask(Rest(), 0.0, need=1.0) == []
    assert Rest().ask((), late=True, capacity=1.0, need=2.0, now=0.0) == []
    rest = Rest()
    assert ask(rest, 0.0) == [STOP]
    assert ask(rest, SUSPEND_AGAIN - 0.1) == []
    assert ask(rest, SUSPEND_AGAIN) == [STOP]
    more = rest.ask(("a", "c"), late=True, capacity=1.0, need=2.0, now=SUSPEND_AGAIN + 1)
    assert more == [Suspend(replicas=("a", "c"), wanted=True)]


def test_training_goes_on_when_the_load_has_fallen_or_nobody_was_late_for_long() -> None:
    rest = Rest()
    ask(rest, 0.0)
    assert ask(rest, QUIET_SECONDS, late=False) == []
    assert ask(rest, QUIET_SECONDS + 0.1, late=False) == [GO]
    assert ask(rest, 100.0, late=False) == []  # told once
    ask(rest, 200.0)
    assert ask(rest, 201.0, late=False, need=0.71) == []
    assert ask(rest, 202.0, late=False, need=0.69) == [GO]


# ---------------------------------------------------------------- how fast a queue empties


def test_the_rate_is_of_the_last_half_minute_since_the_first() -> None:
    flow = Outflow()
    assert flow.rate(5.0) == 0.0
    flow.left(4, 10.2)
    assert flow.rate(10.4) == 4.0  # less than a second counts as one
    flow.left(2, 10.9)
    flow.left(6, 14.0)
    assert flow.rate(16.0) == 2.0
    assert flow.rate(10.0 + SECONDS) == pytest.approx(12 / SECONDS)
    assert flow.rate(11.0 + SECONDS) == pytest.approx(6 / (SECONDS - 3))
    flow.left(1, 20.0 + 2 * SECONDS)  # what is older is forgotten without being asked for
    assert flow.rate(21.0 + 2 * SECONDS) == 1.0
