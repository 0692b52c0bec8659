"""Whose turn it is among many replicas: the active set first, holders of an adapter besides."""

from __future__ import annotations

import pytest

from services.dispatcher.policies.base import Release
from services.dispatcher.policies.collm import Collm
from services.dispatcher.policies.parts.choice import LANES_TRIED
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.line import Line
from services.dispatcher.policies.parts.waiting import Waiting
from shared.latency import LatencyModel
from tests.dispatcher.driver import Driver
from tests.dispatcher.made import request, told, view, where
from tests.dispatcher.scene import lane

QUICK = LatencyModel(alpha0=0.004, alpha1=1e-4, pi0=0.001, pi1=1e-4)


def line(count: int, active: int) -> tuple[Line, list[Lane]]:
    made, lanes = Line(), [lane(f"r{n:02}", b_limit=2) for n in range(count)]
    for rank, each in enumerate(lanes):
        each.rank = rank
        made.told(each)
    made.renew(lanes, active)
    return made, lanes


def fill(each: Lane) -> None:
    for n in range(2):
        each.release(Waiting(request(f"{each.view.id}{n}"), 1.0, 1.0, 9.0, 0.0), 0.0)


# ------------------------------------------------------------ turns


def test_those_of_the_active_set_come_up_in_turn_and_in_order() -> None:
    made, lanes = line(12, 10)
    assert made.inside(4) == (lanes[:4], False)
    assert made.inside(4) == (lanes[4:8], False)
    assert made.inside(4) == ([lanes[0], lanes[1], lanes[8], lanes[9]], False)
    assert made.inside(10) == (lanes[:10], True), "that is all of them"
    assert made.outside(1) == [lanes[10]]
    assert made.outside(9) == lanes[10:]
    assert made.outside(0) == []


def test_full_ones_are_left_out_until_they_are_freed() -> None:
    made, lanes = line(10, 8)
    for each in (*lanes[:3], lanes[9]):
        fill(each)
    assert made.inside(4) == (lanes[3:7], False)
    assert made.outside(2) == [lanes[8]]
    lanes[1].leave("r010", 1.0, learn=False)
    made.freed(lanes[1], inside=True)
    lanes[9].leave("r090", 1.0, learn=False)
    made.freed(lanes[9], inside=False)
    assert made.inside(8) == ([lanes[1], *lanes[3:8]], True)
    assert made.outside(2) == lanes[8:]


def test_only_so_many_full_ones_are_looked_at_for_one_decision() -> None:
    made, lanes = line(10, 10)
    for each in lanes:
        fill(each)
    assert made.inside(2) == ([], False)
    assert made.inside(2) == ([], True)


def test_one_that_is_gone_is_in_no_book() -> None:
    made, lanes = line(3, 2)
    lanes[0].view = view("r00", adapters={"x": "1"})
    made.told(lanes[0])
    assert made.holders("x", 4) == [lanes[0]]
    for each in lanes:
        made.gone(each)
    assert (made.inside(9), made.outside(9), made.holders("x", 4)) == (([], True), [], [])
    assert (made._holders, made._held) == ({}, {})


def test_who_holds_an_adapter_is_known_and_comes_up_in_turn() -> None:
    made, lanes = line(6, 6)
    for each in lanes[:4]:
        each.view = view(each.view.id, adapters={"x": "1", "y": "1"})
        made.told(each)
    fill(lanes[1])
    assert made.holders("x", 2) == [lanes[0], lanes[2]]
    assert made.holders("x", 2) == [lanes[3], lanes[0]]
    lanes[0].view = view("r00", adapters={"y": "2"})
    made.told(lanes[0])
    lanes[3].view = view("r03", adapters={"x": "1"}, dispatchable=False)
    made.told(lanes[3])
    assert made.holders("x", 9) == [lanes[2]]
    assert made.holders("y", 9) == [lanes[0], lanes[2]]
    assert made.holders("z", 9) == []


# ------------------------------------------------------------ in a cluster


def cluster(count: int, **more: object) -> Collm:
    policy = Collm()
    told(policy, *(view(f"r{n:02}", latency=QUICK, **more) for n in range(count)))
    policy.decide(0.0)
    return policy


@pytest.mark.parametrize("count", [LANES_TRIED, 64])
def test_replicas_outside_the_active_set_receive_nothing_however_many_there_are(
    count: int,
) -> None:
    """A load that one in eight carries: the others have nothing to do and can train."""
    policy = Collm()
    driver = Driver(policy, 0.06)
    for n in range(count):
        driver.at(0.0, view(f"r{n:02}", b_limit=4, b_max=4, latency=QUICK))
    for n in range(400):
        at = 0.02 * n
        driver.at(at, request(f"q{n}", arrival=at, deadline=at + 1.0))
    driver.run()
    used = {r.replica for at, r in driver.releases if at > 3.0}
    assert len(used) <= policy.macro.active + 1, sorted(used)
    assert len(driver.ended) == 400


def test_others_are_taken_where_all_of_the_active_set_is_full() -> None:
    policy = cluster(40, b_limit=1)
    assert policy.macro.active == 1
    for n in range(3):
        policy.on_arrival(request(f"q{n}", deadline=1.0), 0.0)
    found = policy.decide(0.0)
    assert len({r.replica for r in found if isinstance(r, Release)}) == 3
    assert policy.queued() == 0


def test_one_that_fits_nowhere_inside_is_tried_outside_the_next_time() -> None:
    """Twenty are active, open, and would make those in flight late; the others are empty."""
    policy = cluster(40, b_limit=4)
    policy.macro.active = 20
    policy.macro.line.renew(policy.macro.order, 20)
    for each in policy.macro.order[:20]:
        each.release(Waiting(request(f"{each.view.id}", deadline=0.16), 10.0, 0.1, 9.0, 0.0), 0.0)
        each.prefill_end = 0.0
        assert 0.02 < each.slack < 0.2
    policy.on_arrival(request("q", prompt_tokens=2000, deadline=0.5), 0.0)
    assert where(policy.decide(0.0)) == {}
    (replica,) = where(policy.decide(0.001))
    assert policy.lanes[replica].rank >= 20


def test_of_many_replicas_the_one_that_holds_the_adapter_is_found() -> None:
    policy = cluster(64)
    told(policy, view("r40", latency=QUICK, adapters={"x": "1"}))
    policy.decide(0.0)
    for n in range(2):
        policy.on_arrival(request(f"q{n}", adapter="x", deadline=5.0), 0.01)
        assert where(policy.decide(0.01 + 0.1 * n)) == {"r40": (f"q{n}",)}
    policy.on_arrival(request("q2", adapter="x", deadline=5.0), 0.3)
    assert where(policy.decide(0.3)) == {"r00": ("q2",)}, "it is full"
