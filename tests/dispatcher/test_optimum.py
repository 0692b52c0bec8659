"""The pacing policy against the exact offline optimum of small random cases.

Optimum: batches on identical replicas, each finishing before its earliest deadline; each request
at most once and not before its arrival; one batch at a time a replica; value: tokens. Solved as a
0-1 program over start times on a grid with durations rounded down, so it bounds from above what
any schedule of whole batches reaches, knowing the future.
"""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np

from services.dispatcher.policies.base import Request
from services.dispatcher.policies.collm import Collm
from shared.latency import LatencyModel
from shared.profile import Profile
from shared.slo import Slo
from sim.job import Job
from sim.replica import Batching
from sim.world import Delays, World

LATENCY = LatencyModel(alpha0=0.004, alpha1=3e-5, pi0=0.001, pi1=1.1e-4)
GRID = 0.02  # seconds
LIMIT_MS = 500.0
CASES = 40


def _case(rng: random.Random) -> tuple[int, list[tuple[float, int, int]]]:
    """(replicas, [(arrival, prompt, output)]): about as much as can be carried, or too much."""
    replicas = rng.randint(1, 3)
    count = rng.randint(4, 12)
    work = [
        (rng.uniform(0.0, 0.8), rng.randint(100, 2500), rng.randint(4, 60)) for _ in range(count)
    ]
    return replicas, sorted(work)


def _optimum(replicas: int, work: list[tuple[float, int, int]]) -> float:
    """Most tokens in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # not while tests are collected
    from scipy.sparse import coo_array

    columns: list[tuple[tuple[int, ...], int, int]] = []  # members, start, slots
    for size in (1, 2, 3):
        for members in itertools.combinations(range(len(work)), size):
            prompt = sum(work[m][1] for m in members)
            longest = max(work[m][2] for m in members)
            seconds = LATENCY.t_prefill(prompt) + longest * LATENCY.t_infer(size)
            first = int(max(work[m][0] for m in members) / GRID)
            last = min(work[m][0] for m in members) + LIMIT_MS / 1e3 - seconds
            for start in range(first, int(last / GRID) + 1):
                columns.append((members, start, max(1, int(seconds / GRID))))
    if not columns:
        return 0.0
    rows, cols = [], []
    for column, (members, start, slots) in enumerate(columns):
        for row in (*members, *(len(work) + t for t in range(start, start + slots))):
            rows.append(row)
            cols.append(column)
    height = max(rows) + 1
    matrix = coo_array((np.ones(len(rows)), (rows, cols)), shape=(height, len(columns)))
    upper = np.full(height, float(replicas))
    upper[: len(work)] = 1.0
    value = -np.array([sum(work[m][2] for m in members) for members, _, _ in columns], float)
    solved = milp(
        value,
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, upper),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        options={"time_limit": 10.0},
    )
    assert solved.x is not None, solved.message
    return float(-solved.fun)


def _achieved(replicas: int, work: list[tuple[float, int, int]]) -> float:
    """Tokens in time of the policy in the simulator, lengths known, no overhead."""
    slo = Slo(e2e_ms=LIMIT_MS)
    jobs = [
        Job(
            Request(
                id=f"q{number}",
                arrival=arrival,
                prompt_tokens=prompt,
                max_tokens=output,
                deadline=arrival + LIMIT_MS / 1e3,
            ),
            output,
            "",
            slo,
            arrival,
        )
        for number, (arrival, prompt, output) in enumerate(work)
    ]
    profile = Profile(name="case", source="made up", coefficients=LATENCY, b_max=16)
    world = World(
        Collm(epsilon=0.001, safety=0.0),
        [profile] * replicas,
        iter(jobs),
        batching=Batching(),
        delays=Delays(request=0.0, release=0.0, reply=0.0),
    )
    world.run()
    return float(world.recorder.total.good_tokens)


def test_median_goodput_is_within_ten_percent_of_the_offline_optimum() -> None:
    rng = random.Random(7)
    ratios = []
    for _ in range(CASES):
        replicas, work = _case(rng)
        best = _optimum(replicas, work)
        if best > 0:
            ratios.append(_achieved(replicas, work) / best)
    median = statistics.median(ratios)
    ordered = sorted(ratios)
    print(
        f"share of the offline optimum over {len(ratios)} cases: median {median:.3f}, "
        f"lowest tenth {ordered[len(ordered) // 10]:.3f}"
    )
    assert median >= 0.9
