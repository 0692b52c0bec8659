"""What is asked of a model: rate, lengths, objectives, waits."""

from __future__ import annotations

import pytest

from services.dispatcher.demand_meter import DemandMeter
from services.dispatcher.policies.base import Request


def request(arrival: float, slo: float | None = None, prompt: int = 100) -> Request:
    return Request(
        id=f"r{arrival}",
        arrival=arrival,
        prompt_tokens=prompt,
        max_tokens=50,
        deadline=None if slo is None else arrival + slo,
    )


def test_nothing_asked_is_no_demand() -> None:
    found = DemandMeter().summary(1000.0)
    assert (found.rate, found.slo, found.wait_p95, found.budget) == (0, None, 0, None)


def test_the_rate_follows_the_arrivals() -> None:
    steady = DemandMeter()
    for second in range(60):
        for i in range(5):
            steady.arrived(request(1000 + second + i / 5), 1000 + second + i / 5)
    assert steady.summary(1060.0).rate == pytest.approx(5.0)
    assert steady.summary(1060.0 + 300).rate == 0.0  # and they are forgotten


def test_the_strictest_objective_with_load_counts_and_a_single_odd_one_does_not() -> None:
    meter = DemandMeter()
    for i in range(100):
        meter.arrived(request(1000.0, slo=10.0 if i % 2 else 2.0), 1000.0)
    meter.arrived(request(1000.0, slo=0.001), 1000.0)
    assert meter.summary(1001.0).slo == pytest.approx(2.0)


def test_the_budget_is_what_waiting_leaves_of_the_objective() -> None:
    meter = DemandMeter()
    for i in range(100):
        asked = request(1000.0, slo=10.0)
        meter.arrived(asked, 1000.0)
        meter.released(asked, 1000.0 + i / 100)
    found = meter.summary(1001.0)
    assert found.wait_p95 == pytest.approx(0.94)
    assert found.budget == pytest.approx(9.06)


def test_lengths_follow_what_was_asked_and_answered() -> None:
    meter = DemandMeter()
    for _ in range(400):
        meter.arrived(request(1000.0, prompt=300), 1000.0)
        meter.answered(request(1000.0), 20)
    found = meter.summary(1001.0)
    assert found.prompt == pytest.approx(300)
    assert found.output == pytest.approx(20, rel=0.05)


def test_lengths_under_the_strictest_limit_are_told_apart_from_the_mean() -> None:
    """Short answers with a tight limit beside long ones without: the mean of both under that
    limit looked impossible to serve, and the cluster never trained."""
    meter = DemandMeter()
    for i in range(400):
        tight, loose = request(1000.0 + i / 100, 0.5, prompt=50), request(1000.0, prompt=900)
        for asked, tokens in ((tight, 10), (loose, 200)):
            meter.arrived(asked, 1000.0 + i / 100)
            meter.answered(asked, tokens)
    found = meter.summary(1005.0)
    assert found.slo == pytest.approx(0.5)
    assert found.limited_prompt == pytest.approx(50)
    assert found.limited_output == pytest.approx(10)
    assert found.output > 50
