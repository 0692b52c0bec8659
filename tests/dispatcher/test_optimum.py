"""The pacing policy against the exact offline optimum of small random cases.

Optimum: batches that finish before their earliest deadline, on replicas of unequal quality; each
request at most once and not before its arrival; one batch at a time a replica; value: tokens times
the replica's quality (Q-goodput). Solved as a 0-1 program over start times on a grid with durations
rounded down, so it bounds from above what any schedule of whole batches reaches, knowing the
future.
"""

from __future__ import annotations

import random
import statistics

import numpy as np

from services.dispatcher.policies.base import Request
from services.dispatcher.policies.collm import Collm
from shared.latency import LatencyModel
from shared.profile import Profile
from shared.slo import Slo
from sim.job import Job
from sim.replica import Batching, Replica
from sim.world import Delays, World

LATENCY = LatencyModel(alpha0=0.004, alpha1=3e-5, pi0=0.001, pi1=1.1e-4)
GRID = 0.02  # seconds
LIMIT = 0.5  # seconds
BATCH_MAX = 5
CASES = 40

Work = list[tuple[float, int, int]]  # arrival, prompt, output
Column = tuple[tuple[int, ...], int, int]  # members, start and length on the grid


def _case(rng: random.Random) -> tuple[list[float], Work]:
    """(quality by replica, requests): about as much as can be carried, or too much."""
    qualities = [rng.uniform(0.5, 2.0) for _ in range(rng.randint(1, 3))]
    work = [
        (rng.uniform(0.0, 0.8), rng.randint(100, 2500), rng.randint(4, 60))
        for _ in range(rng.randint(4, 12))
    ]
    return qualities, sorted(work)


def _columns(work: Work) -> list[Column]:
    """All batches and starts that keep every limit."""
    columns: list[Column] = []
    possible: list[tuple[int, ...]] = [()]
    for _ in range(BATCH_MAX):
        larger = []
        for members in possible:
            for new in range(members[-1] + 1 if members else 0, len(work)):
                found = _starts(work, (*members, new))
                columns += found
                if found:  # what fits nowhere fits nowhere with one more either
                    larger.append((*members, new))
        possible = larger
    return columns


def _starts(work: Work, members: tuple[int, ...]) -> list[Column]:
    prompt = sum(work[m][1] for m in members)
    longest = max(work[m][2] for m in members)
    seconds = LATENCY.t_prefill(prompt) + longest * LATENCY.t_infer(len(members))
    first = int(max(work[m][0] for m in members) / GRID)
    last = min(work[m][0] for m in members) + LIMIT - seconds
    slots = max(1, int(seconds / GRID))
    return [
        (members, start, slots) for start in range(first, int(last / GRID) + 1 if last >= 0 else 0)
    ]


def _optimum(qualities: list[float], work: Work) -> float:
    """Most tokens in time, each times the quality of its replica; never less than that."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # not while tests are collected
    from scipy.sparse import coo_array

    columns = [(k, c) for k in range(len(qualities)) for c in _columns(work)]
    if not columns:
        return 0.0
    horizon = 1 + max(start + slots for _, (_, start, slots) in columns)
    rows, cols = [], []
    for number, (replica, (members, start, slots)) in enumerate(columns):
        busy = len(work) + replica * horizon
        for row in (*members, *(busy + t for t in range(start, start + slots))):
            rows.append(row)
            cols.append(number)
    height = len(work) + len(qualities) * horizon
    matrix = coo_array((np.ones(len(rows)), (rows, cols)), shape=(height, len(columns)))
    value = [-qualities[k] * sum(work[m][2] for m in c[0]) for k, c in columns]
    solved = milp(
        np.array(value, float),
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, np.ones(height)),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        options={"time_limit": 10.0, "mip_rel_gap": 0.005},
    )
    assert solved.x is not None, solved.message
    return float(-solved.mip_dual_bound)


class _Valued(World):
    """Adds up the tokens in time, each times the quality of the replica that served it."""

    value = 0.0

    def finish(self, job: Job, replica: Replica) -> None:
        if self.kernel.now <= (job.request.deadline or 0.0):
            self.value += job.output * self.quality[replica.name]
        super().finish(job, replica)


def _achieved(qualities: list[float], work: Work) -> float:
    """The same of the policy in the simulator, lengths known, no overhead."""
    slo = Slo(e2e_ms=LIMIT * 1e3)
    jobs = [
        Job(
            Request(
                id=f"q{number}",
                arrival=arrival,
                prompt_tokens=prompt,
                max_tokens=output,
                deadline=arrival + LIMIT,
            ),
            output,
            "",
            slo,
            arrival,
        )
        for number, (arrival, prompt, output) in enumerate(work)
    ]
    profile = Profile(name="case", source="made up", coefficients=LATENCY, b_max=16)
    world = _Valued(
        Collm(epsilon=0.001, safety=0.0),
        [profile] * len(qualities),
        iter(jobs),
        batching=Batching(),
        delays=Delays(request=0.0, release=0.0, reply=0.0),
    )
    for name, quality in zip(world.replicas, qualities, strict=True):
        world.quality[name] = quality
        world.announce(name)
    world.run()
    return world.value


def test_median_q_goodput_is_within_ten_percent_of_the_offline_optimum() -> None:
    rng = random.Random(7)
    ratios = []
    for _ in range(CASES):
        qualities, work = _case(rng)
        best = _optimum(qualities, work)
        if best > 0:
            ratios.append(_achieved(qualities, work) / best)
    median = statistics.median(ratios)
    ordered = sorted(ratios)
    print(
        f"share of the offline optimum over {len(ratios)} cases: median {median:.3f}, "
        f"lowest tenth {ordered[len(ordered) // 10]:.3f}"
    )
    assert median >= 0.9
