"""Schedules: seeded, scaled, limited."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from loadgen.arrivals import Planned, assign, from_trace, gamma, limited
from loadgen.trace import Row


def gaps(burstiness: float, seed: int = 1, n: int = 20000) -> np.ndarray:
    due = [p.due for p in itertools.islice(gamma(10.0, burstiness, seed), n)]
    return np.diff([0.0, *due])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_rate_and_variation(burstiness: float) -> None:
    g = gaps(burstiness)
    assert g.mean() == pytest.approx(0.1, rel=0.05)
    assert g.std() / g.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_seed_fixes_the_schedule() -> None:
    assert (gaps(1.0, 7, 50) == gaps(1.0, 7, 50)).all()
    assert (gaps(1.0, 7, 50) != gaps(1.0, 8, 50)).any()


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert [p.due for p in limited(gamma(float("inf"), 1.0, 0), limit=5)] == [0.0] * 5


def test_scales_compress_time_and_stretch_lengths() -> None:
    rows = iter([Row(0.0, 100, 1, "a"), Row(10.0, 2, 50, "b")])
    planned = list(
        from_trace(rows, rate_scale=2.0, prompt_scale=0.1, output_scale=0.5, max_output=20)
    )
    assert planned == [Planned(0, 0.0, 10, 1, "a"), Planned(1, 5.0, 1, 20, "b")]


def test_duration_and_limit_end_the_schedule() -> None:
    rows = [Row(float(k), 1, 1, "") for k in range(10)]
    assert len(list(limited(from_trace(iter(rows)), duration=4.5))) == 5
    assert len(list(limited(from_trace(iter(rows)), limit=3, duration=4.5))) == 3


def test_zipf_shares_follow_the_rank() -> None:
    counts = Counter(itertools.islice(assign(["a", "b", "c"], "zipf", 3), 30000))
    assert counts["a"] / counts["b"] == pytest.approx(2.0, rel=0.1)
    assert counts["a"] / counts["c"] == pytest.approx(3.0, rel=0.1)


def test_round_robin_and_random_use_every_name() -> None:
    assert list(itertools.islice(assign(["a", "b"], "round-robin", 0), 4)) == ["a", "b", "a", "b"]
    assert set(itertools.islice(assign(["a", "b"], "random", 0), 50)) == {"a", "b"}
