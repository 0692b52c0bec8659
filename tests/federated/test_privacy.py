"""Local differential privacy: the clip holds, the noise has the promised size, epsilon is right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shared.privacy import PrivacyError, clip_and_noise, difference_norm, epsilon

PARENT = {"lora_A": np.zeros((100, 100), np.float32), "lora_B": np.ones((50, 100), np.float32)}


def moved(by: float) -> dict[str, np.ndarray]:
    return {k: t + np.float32(by) for k, t in PARENT.items()}


@pytest.mark.parametrize(("by", "wanted"), [(1.0, 0.5), (1e-4, 1e-4 * math.sqrt(15000))])
def test_the_difference_is_clipped_to_the_bound_and_never_enlarged(
    by: float, wanted: float
) -> None:
    rng = np.random.default_rng(0)
    out = clip_and_noise(PARENT, moved(by), clip=0.5, noise_multiplier=0.0, rng=rng)
    assert difference_norm(PARENT, out) == pytest.approx(wanted, rel=1e-3)


def test_the_noise_has_the_promised_deviation_and_spares_frozen_tensors() -> None:
    rng = np.random.default_rng(0)
    out = clip_and_noise(
        PARENT, PARENT, clip=0.5, noise_multiplier=2.0, rng=rng, frozen=frozenset({"lora_B"})
    )
    assert np.std(out["lora_A"]) == pytest.approx(1.0, rel=0.05)
    assert np.array_equal(out["lora_B"], PARENT["lora_B"])


def test_bad_settings_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(PrivacyError, match="clip"):
        clip_and_noise(PARENT, PARENT, clip=0.0, noise_multiplier=1.0, rng=rng)


def exact_epsilon(sigma: float, delta: float) -> float:
    """Of one Gaussian release (Balle and Wang 2018, theorem 8), by root finding."""
    from scipy.optimize import brentq  # a second of imports that no other test here needs
    from scipy.stats import norm

    def gap(eps: float) -> float:
        a, b = 1 / (2 * sigma) - eps * sigma, -1 / (2 * sigma) - eps * sigma
        return float(norm.cdf(a) - math.exp(eps) * norm.cdf(b) - delta)

    return float(brentq(gap, 0.0, 100.0))


def test_epsilon_bounds_the_exact_value_closely_and_grows_with_rounds() -> None:
    pytest.importorskip("dp_accounting", reason="the extra 'privacy' is not installed")
    for sigma in (1.0, 4.0):
        exact = exact_epsilon(sigma, 1e-5)
        assert exact <= epsilon(sigma, 1, 1e-5) <= 1.25 * exact
    # n releases at sigma equal one at sigma / sqrt(n)
    assert epsilon(4.0, 16, 1e-5) == pytest.approx(epsilon(1.0, 1, 1e-5), rel=1e-6)
    assert epsilon(1.0, 0, 1e-5) == 0.0
    assert math.isinf(epsilon(0.0, 1, 1e-5))
