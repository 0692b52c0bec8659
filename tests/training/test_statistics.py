"""Noise scale and learning rates."""

from __future__ import annotations

import numpy as np
import pytest

from services.replica.training.statistics import (
    Noise,
    estimate_noise,
    learning_rate,
    rate_factor,
    smooth,
)


def test_the_noise_estimate_is_unbiased() -> None:
    """Gradients of known mean and covariance: the estimates average to the truth."""
    rng = np.random.default_rng(0)
    mean, spread, B, n = np.full(50, 0.2), 0.5, 4, 8
    found = []
    for _ in range(3000):
        # A micro-gradient is the mean of B samples' gradients.
        micro = mean + spread * rng.normal(size=(n, B, 50)).mean(axis=1)
        noise = estimate_noise((micro**2).sum(axis=1).tolist(), (micro.mean(0) ** 2).sum(), B)
        assert noise is not None
        found.append((noise.gradient, noise.trace))
    gradient, trace = np.mean(found, axis=0)
    assert gradient == pytest.approx(50 * 0.04, rel=0.02)
    assert trace == pytest.approx(50 * 0.25, rel=0.02)


def test_equal_gradients_have_no_noise_and_opposite_ones_only_noise() -> None:
    alike = estimate_noise([4.0] * 8, 4.0, 4)
    assert alike is not None
    assert alike.scale == pytest.approx(1e-12 / 4.0)
    against = estimate_noise([4.0, 4.0], 0.0, 4)
    assert against is not None
    assert against.scale > 1e12


@pytest.mark.parametrize("squares", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_too_few_or_infinite_gradients_give_no_estimate(squares: list[float]) -> None:
    assert estimate_noise(squares, 1.0, 4) is None
    old = Noise(1.0, 2.0)
    assert smooth(old, None) is old


def test_schedules() -> None:
    rates = [learning_rate(1.0, s, schedule="cosine", total=10, warmup=2) for s in range(14)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:11] == sorted(rates[2:11], reverse=True)
    assert rates[10] == rates[13] == pytest.approx(0.1)
    assert learning_rate(1.0, 7, schedule="constant", total=10) == 1.0


@pytest.mark.parametrize(("B", "wanted"), [(2, 1.0), (8, 2.0), (1, 0.5**0.5)])
def test_a_larger_batch_goes_further_by_its_square_root(B: int, wanted: float) -> None:
    assert rate_factor(B, 2) == pytest.approx(wanted)
    assert rate_factor(B, 0) == 1.0, "the rate is for any batch"
