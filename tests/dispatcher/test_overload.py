"""Goodput under overload: what comes beyond the capacity takes nothing from what can be served."""

from __future__ import annotations

import random
from functools import cache

import pytest

from services.dispatcher.policies.base import Request
from services.dispatcher.policies.registry import create
from shared.latency import LatencyModel
from shared.profile import Profile
from shared.slo import Slo
from sim.job import Job
from sim.recorder import Tally
from sim.replica import Batching
from sim.world import Delays, World

LATENCY = LatencyModel(alpha0=0.004, alpha1=3e-5, pi0=0.001, pi1=1.1e-4)
PROFILE = Profile(name="case", source="made up", coefficients=LATENCY, b_max=32)
REPLICAS = 4
SECONDS = 20.0  # of arrivals
LIMIT = 1.0  # seconds, end to end
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # times that at which round robin saturates


def _jobs(rate: float, alike: bool) -> list[Job]:
    """Poisson arrivals; how long an answer gets is not known before. ``alike``: all the same."""
    rng = random.Random(11)
    jobs: list[Job] = []
    now = rng.expovariate(rate)
    while now < SECONDS:
        request = Request(
            id=f"q{len(jobs)}",
            arrival=now,
            prompt_tokens=1300 if alike else rng.randint(100, 2500),
            max_tokens=400,
            deadline=now + LIMIT,
        )
        output = 50 if alike else rng.randint(4, 100)
        jobs.append(Job(request, output, "", Slo(e2e_ms=LIMIT * 1e3), now))
        now += rng.expovariate(rate)
    return jobs


def _run(policy: str, rate: float, alike: bool, **options: str) -> Tally:
    """What became of the requests."""
    world = World(
        create(policy, **options),
        [PROFILE] * REPLICAS,
        iter(_jobs(rate, alike)),
        batching=Batching(),
        delays=Delays(),
    )
    world.run()
    return world.recorder.total


@cache
def _saturation(alike: bool) -> float:
    """Requests a second at which fewer than nine in ten are in time by round robin."""
    rate = 8.0
    while (tally := _run("round_robin", rate, alike)).good >= 0.9 * tally.offered:
        rate *= 1.1
    return rate


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("on_overload", ["best_effort", "shed"])
def test_goodput_at_four_times_the_saturation_is_nine_tenths_of_its_peak(
    on_overload: str, alike: bool
) -> None:
    runs = {
        load: _run("collm", load * _saturation(alike), alike, on_overload=on_overload)
        for load in LOADS
    }
    goodput = {load: tally.good_tokens / SECONDS for load, tally in runs.items()}
    print(f"{on_overload}, tokens/s in time by load: { {x: round(g) for x, g in goodput.items()} }")
    assert goodput[4.0] >= 0.9 * max(goodput.values())
    assert (runs[4.0].shed > 0) is (on_overload == "shed")
    assert runs[4.0].unfinished == 0


@pytest.mark.parametrize("alike", [False, True])
def test_in_order_of_arrival_it_collapses(alike: bool) -> None:
    """What the test above says of a policy that gives up nothing."""
    low, high = (
        _run("least_loaded", load * _saturation(alike), alike).good_tokens for load in (1.0, 4.0)
    )
    assert high < 0.5 * low
