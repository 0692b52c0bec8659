"""The validity bench's own arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sim import error, slowed, slowed_slo
from shared import profile, slo


def test_a_slowed_profile_takes_as_many_times_as_long(tmp_path: Path) -> None:
    known = profile.load("h20-8b")
    slow = profile.load(slowed("h20-8b", 10.0, tmp_path))
    once, tenfold = (
        known.coefficients.service(4, 1, 100, 20),
        slow.coefficients.service(4, 1, 100, 20),
    )
    assert tenfold == pytest.approx(10 * once)
    assert slow.b_max == known.b_max
    assert "slowed 10 times" in slow.source


def test_limits_are_slowed_alike_and_keep_their_tags() -> None:
    limits = slo.parse(slowed_slo(["ttft:100", "code/e2e:0.5s"], 10.0))
    assert limits[""].ttft_ms == 1000
    assert limits["code"].e2e_ms == 5000


def test_errors_are_relative_except_for_shares() -> None:
    real = {"p50_e2el_ms": 200.0, "slo_attainment": 0.8, "p99_e2el_ms": None}
    sim = {"p50_e2el_ms": 190.0, "slo_attainment": 0.9, "p99_e2el_ms": 1.0}
    assert error(real, sim, "p50_e2el_ms") == -0.05
    assert error(real, sim, "slo_attainment") == 0.1
    assert error(real, sim, "p99_e2el_ms") is None
