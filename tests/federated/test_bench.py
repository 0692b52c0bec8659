"""What the federated benchmark computes from a run's records."""

from __future__ import annotations

from typing import Any

import pytest

from bench.federated.measures import fit_error
from bench.federated.pairs import (
    COORDINATOR,
    curve,
    dominating,
    joint_time,
    point,
    target_of,
    without_version,
)
from bench.federated.plots import breakdown
from shared.messages import StepSample


def test_the_time_to_a_target_lies_between_two_rounds() -> None:
    points = [(0.0, 2.0), (10.0, 1.8), (20.0, 1.7)]
    assert joint_time(points, 1.9) == pytest.approx(5.0)
    assert joint_time(points, 1.75) == pytest.approx(15.0)
    assert joint_time(points, 1.8) == pytest.approx(10.0)
    assert joint_time(points, 2.5) == 0.0
    assert joint_time(points, 1.6) is None
    assert joint_time([], 1.6) is None


def test_a_curve_begins_with_the_parents_loss() -> None:
    rounds = [
        {"at": 110.0, "heldout": 1.9, "heldout_before": 2.0},
        {"at": 120.0, "heldout": None, "heldout_before": None},
        {"at": 130.0, "heldout": 1.8, "heldout_before": 1.9},
    ]
    assert curve(rounds, 100.0) == [(0.0, 2.0), (10.0, 1.9), (30.0, 1.8)]
    assert curve([], 100.0) == []


def test_the_target_is_what_every_run_with_a_round_reached() -> None:
    runs: list[list[dict[str, Any]]] = [
        [{"curve": [(0.0, 2.0), (5.0, 1.7)]}, {"curve": [(0.0, 2.0), (5.0, 1.8)]}],
        [{"curve": [(0.0, 2.0), (9.0, 1.6)]}],
    ]
    assert target_of(runs) == 1.8
    assert target_of([*runs, [{"curve": []}]]) == 1.8, "the one without is told by its time: none"
    assert target_of([]) is None
    assert target_of([[{"curve": []}]]) is None


def test_a_run_without_a_round_served_what_every_run_began_with() -> None:
    runs: list[list[dict[str, Any]]] = [
        [{"curve": [(0.0, 2.0), (5.0, 1.7)], "goodput": 10.0, "q_goodput": 5.5}],
        [{"curve": [], "goodput": 8.0, "q_goodput": None}],
    ]
    without_version(runs)
    assert [way[0]["q_goodput"] for way in runs] == [5.5, 4.0]
    nothing: list[list[dict[str, Any]]] = [[{"curve": [], "goodput": 8.0, "q_goodput": None}]]
    without_version(nothing)
    assert nothing[0][0]["q_goodput"] is None


def made(pair: Any, q: float | None, jct: float | None) -> dict[str, Any]:
    return {"pair": pair, "q_goodput": q, "jct": jct}


def test_a_pair_dominates_that_is_worse_on_no_axis_and_better_on_one() -> None:
    own = made(COORDINATOR, 5.0, 60.0)
    others = [
        made((1, 4), 5.0, 50.0),
        made((2, 3), 6.0, 60.0),
        made((3, 2), 6.0, 61.0),
        made((4, 1), 4.9, 50.0),
        made((8, 1), 5.0, 60.0),
        made((9, 1), 9.0, None),
    ]
    assert dominating([own, *others]) == [(1, 4), (2, 3)]
    late = made(COORDINATOR, 5.0, None)
    assert dominating([late, made((2, 3), 5.0, 90.0), made((3, 2), 4.9, 1.0)]) == [(2, 3)]
    assert dominating([late, made((2, 3), 5.1, None), made((3, 2), None, None)]) == [(2, 3)]


def test_a_point_is_the_median_of_its_runs_and_none_where_one_missed_the_target() -> None:
    run = {"q_goodput": 5.0, "attainment": 1.0, "rounds_done": 2, "batches": []}
    runs = [{**run, "curve": [(0.0, 2.0), (10.0 * n, 1.8)]} for n in (1, 2, 3)]
    assert point((1, 4), runs, 1.8)["jct"] == 20.0
    assert point((1, 4), runs, 1.7)["jct"] is None


def test_a_rounds_breakdown_adds_up_to_its_seconds() -> None:
    found = {
        "seconds": 20.0,
        "stages": {"configure": 0.1, "clients": 17.0, "aggregate": 0.4, "check": 2.0},
        "slowest": {"train": 10.0, "wait": 5.0, "update": 0.5, "evaluate": 1.0, "other": 0.1},
    }
    parts = breakdown(found)
    assert parts["steps"] == 15.5
    assert parts["queue and gathering"] == pytest.approx(0.4)
    assert sum(parts.values()) == pytest.approx(20.0)


def sample(b: int, B: int, seconds: float) -> StepSample:
    return StepSample(
        replica="r", model="m", incarnation="1", seq=1, time=0.0, seconds=seconds, b=b, B=B
    )


@pytest.mark.parametrize("slowed", [1.0, 1.8])
def test_the_fits_error_is_of_pairs_that_it_has_not_seen(slowed: float) -> None:
    """Training that takes a core, or nothing, is predicted from the other pairs; chance is not."""
    grid = [(b, B) for b in (1, 2, 4, 8, 16) for B in (0, 1, 2, 4)]
    steps = [
        sample(b, B, (0.02 + 0.002 * b) * (slowed if B else 1.0)) for b, B in grid for _ in range(8)
    ]
    found = fit_error(steps)
    assert len(found["pairs"]) == len(grid)
    assert found["median_error"] < 0.02
