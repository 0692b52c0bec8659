"""Batch sizes at the edges of what a SLO can name."""

from __future__ import annotations

import math

from shared.latency import LatencyModel


def test_without_an_end_to_end_limit_only_the_token_pace_bounds_the_batch() -> None:
    """An infinite budget used to end in an OverflowError."""
    model = LatencyModel(alpha0=0.01, alpha1=0.001, pi1=0.0001)
    assert model.b_star(math.inf, 0, 100, 50, b_max=64) == 64
    assert model.b_star(math.inf, 0, 100, 50, b_max=64, tpot=0.02) == 10


def test_a_vanishing_slope_leaves_the_largest_batch() -> None:
    assert LatencyModel(alpha1=1e-320).b_star(1e9, 0, 0, 1, b_max=7) == 7
