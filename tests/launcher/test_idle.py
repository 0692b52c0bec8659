"""Which replicas may go Idle: thresholds and the guard, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.launcher.idle import (
    NO_QUEUE,
    Candidate,
    Capacity,
    Floors,
    Thresholds,
    Verdict,
    judge,
    thresholds,
)
from services.launcher.windows import Load

FLOORS = Floors(utilisation=0.25, queued=2.0, b=1.0, share=0.5)


def load(utilisation: float = 0.0, queued: float = 0.0, b: float = 0.0) -> Load:
    return Load(utilisation=utilisation, queued=queued, b=b)


def verdicts(loads: dict[str, Load], rates: dict[str, float], **changes: Any) -> list[Verdict]:
    """By default 1.2 times 5 requests/s are needed."""
    values: dict[str, Any] = {
        "floors": FLOORS, "rate": 5.0, "headroom": 0.2, "guarded": True, "completes": {},
    }  # fmt: skip
    return judge(
        [Candidate(id=name, load=each) for name, each in loads.items()],
        [Capacity(id=name, rate=rate) for name, rate in rates.items()],
        **(values | changes),
    )


def idle(found: list[Verdict]) -> dict[str, bool]:
    return {v.id: v.idle for v in found}


# ------------------------------------------------------------ thresholds


def test_a_load_is_below_only_if_both_numbers_are() -> None:
    by_queue = Thresholds(utilisation=0.5, second=2.0, by="queued")
    assert by_queue.below(load(0.4, queued=1.0, b=9.0))
    assert not by_queue.below(load(0.5, queued=1.0))
    assert not by_queue.below(load(0.4, queued=2.0))
    by_b = Thresholds(utilisation=0.5, second=2.0, by="b")
    assert by_b.below(load(0.4, queued=9.0, b=1.0))
    assert not by_b.below(load(0.4, b=2.0))


def test_the_switches_are_the_quantile_or_the_floor() -> None:
    low = thresholds([load(0.1, 0.5, 0.2), load(0.2, 1.5, 0.4)], FLOORS)
    assert low == Thresholds(utilisation=0.25, second=2.0, by="queued")
    high = thresholds([load(0.4, 4.0), load(0.8, 8.0), load(0.9, 9.0)], FLOORS)
    assert high == Thresholds(utilisation=0.8, second=8.0, by="queued")


def test_where_no_queue_is_anywhere_requests_together_count() -> None:
    none = [load(0.1, 0.9 * NO_QUEUE, 4.0), load(0.2, 0.0, 6.0)]
    assert thresholds(none, FLOORS) == Thresholds(utilisation=0.25, second=5.0, by="b")
    assert thresholds([load(0.1, 0.0, 0.5)], FLOORS).second == 1.0
    assert thresholds([load(0.1, NO_QUEUE, 4.0), load()], FLOORS).by == "queued"


def test_the_usual_floors() -> None:
    assert Floors() == Floors(utilisation=0.25, queued=1.0, b=1.0, share=0.3)


# ------------------------------------------------------------ the guard


def test_without_candidates_there_is_no_verdict() -> None:
    assert verdicts({}, {"a": 1.0}) == []


def test_replicas_go_idlest_first_as_long_as_the_rest_carries_the_load() -> None:
    loads = {"busy": load(0.2), "calm": load(0.1), "calmest": load(0.0)}
    found = verdicts(loads, dict.fromkeys(loads, 5.0))
    assert [(v.id, v.idle) for v in found] == [
        ("calmest", True), ("calm", False), ("busy", False),
    ]  # fmt: skip
    found = verdicts(loads, dict.fromkeys(loads, 6.0))
    assert idle(found) == {"calmest": True, "calm": True, "busy": False}


def test_of_equally_used_ones_the_one_with_fewer_requests_goes_then_by_name() -> None:
    loads = {"c": load(0.1, b=0.5), "b": load(0.1, b=0.2), "a": load(0.1, b=0.5)}
    assert [v.id for v in verdicts(loads, dict.fromkeys(loads, 9.0))] == ["b", "a", "c"]


def test_one_above_the_thresholds_is_not_judged() -> None:
    loads = {"a": load(0.9), "b": load(0.95), "c": load(0.1)}
    assert idle(verdicts(loads, dict.fromkeys(loads, 99.0))) == {"c": True}


def test_replicas_that_are_no_candidates_carry_load_too() -> None:
    assert idle(verdicts({"a": load()}, {"a": 1.0, "other": 6.0})) == {"a": True}
    assert idle(verdicts({"a": load()}, {"a": 9.0, "other": 5.9})) == {"a": False}


def test_the_last_one_stays_however_little_is_asked() -> None:
    assert idle(verdicts({"a": load()}, {"a": 9.0}, rate=0.0)) == {"a": False}
    assert idle(verdicts({"a": load()}, {"a": 9.0, "b": 0.0}, rate=0.0)) == {"a": True}


def test_the_papers_rule_asks_nobody_who_carries_the_load() -> None:
    loads = {"a": load(), "b": load()}
    assert idle(verdicts(loads, {"a": 1.0, "b": 1.0}, guarded=False)) == {"a": True, "b": True}


def test_one_that_completes_a_session_counts_with_what_the_members_carry_while_they_train() -> None:
    loads = {"a": load(0.0), "b": load(0.1)}
    found = verdicts(loads, {"a": 5.0, "b": 3.0}, completes={"a": 3.0})
    assert idle(found) == {"a": True}, "the others wait for the next tick"
    found = verdicts(loads, {"a": 5.0, "b": 3.0}, completes={"a": 2.9})
    assert idle(found) == {"a": False, "b": False}
    assert idle(verdicts({"a": load()}, {"a": 9.0}, completes={"a": 6.0})) == {"a": True}
    assert idle(verdicts({"a": load()}, {"a": 9.0}, completes={"a": 5.9})) == {"a": False}


def test_after_one_that_completes_nothing_the_next_is_judged() -> None:
    loads = {"a": load(0.0), "b": load(0.1), "c": load(0.2)}
    found = verdicts(loads, dict.fromkeys(loads, 6.0), completes={"b": 0.0})
    assert idle(found) == {"a": True, "b": True}, "b's session is decided upon anew"


def test_one_that_is_no_dispatchable_replica_takes_nothing_away() -> None:
    assert idle(verdicts({"a": load()}, {"b": 6.0, "c": 6.0})) == {"a": True}


# ------------------------------------------------------------ numbers


def test_a_verdict_tells_its_numbers() -> None:
    (verdict,) = verdicts(
        {"a": load(0.123456, queued=1.23456)}, {"a": 2.0, "b": 7.123456}, rate=1.23456
    )
    assert verdict.idle
    assert verdict.why == {
        "U": 0.1235, "U_switch": 0.25, "queued": 1.235, "queued_switch": 2.0,
        "rest_carries": 7.123, "needed": 1.481,
    }  # fmt: skip


def test_a_refusal_tells_why_and_an_unknown_capacity_is_named() -> None:
    found = verdicts({"a": load(b=0.98765)}, {"a": 2.0, "b": 1.0})
    assert found[0].why["guard"] == "the rest could not carry the load"
    assert (found[0].why["b"], found[0].why["b_switch"]) == (0.988, 1.0)
    found = verdicts({"a": load()}, {"a": 2.0, "b": math.inf})
    assert found[0].why["rest_carries"] == "unknown"
    assert "guard" not in found[0].why


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_moves_the_switch_between_the_idlest_and_the_busiest(share: float) -> None:
    floors = Floors(utilisation=0.0, queued=0.0, b=0.0, share=share)
    found = thresholds([load(0.4, 4.0), load(0.8, 8.0)], floors)
    assert (found.utilisation, found.second) == ((0.8, 8.0) if share else (0.4, 4.0))
