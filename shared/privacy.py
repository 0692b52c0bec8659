"""Local differential privacy of an uploaded update: clip its difference, add Gaussian noise.

The unit is one client's whole difference of a round (the Gaussian mechanism with sensitivity
``clip``); rounds compose. Epsilon comes from dp-accounting's Renyi accountant, the extra
``privacy``; without it noise is still added and epsilon is unknown.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from shared.aggregation import Array, Tensors


class PrivacyError(ValueError):
    """The privacy settings are unusable, or the accountant is not installed; says which."""


def difference_norm(parent: Tensors, tensors: Tensors) -> float:
    """L2 norm of the whole difference over all tensors."""
    total = sum(
        float(np.sum((tensors[n].astype(np.float64) - parent[n]) ** 2)) for n in sorted(tensors)
    )
    return float(np.sqrt(total))


def clip_and_noise(
    parent: Tensors,
    tensors: Tensors,
    *,
    clip: float,
    noise_multiplier: float,
    rng: np.random.Generator,
    frozen: frozenset[str] = frozenset(),
) -> dict[str, Array]:
    """The tensors with their difference to ``parent`` clipped to L2 norm ``clip`` and noised.

    The noise has standard deviation ``noise_multiplier * clip`` a coordinate. Tensors named in
    ``frozen`` were not trained and stay as they are. Use a generator seeded by the system: a
    predictable one protects nothing.
    """
    if clip <= 0 or noise_multiplier < 0:
        raise PrivacyError(
            f"clip {clip} must be positive and noise_multiplier {noise_multiplier} not negative"
        )
    norm = difference_norm(parent, tensors)
    factor = min(1.0, clip / norm) if norm > 0 else 1.0
    out: dict[str, Array] = {}
    for name, tensor in sorted(tensors.items()):
        if name in frozen:
            out[name] = tensor
            continue
        change = (tensor.astype(np.float64) - parent[name]) * factor
        noise = rng.normal(0.0, noise_multiplier * clip, tensor.shape)
        out[name] = (parent[name] + change + noise).astype(np.float32)
    return out


def accountant_installed() -> bool:
    return importlib.util.find_spec("dp_accounting") is not None


def epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Epsilon of (epsilon, delta) after ``rounds`` uploads of one client.

    Raises PrivacyError without dp-accounting; infinite without noise.
    """
    if rounds <= 0:
        return 0.0
    if noise_multiplier <= 0:
        return float("inf")
    if not accountant_installed():
        raise PrivacyError("epsilon needs dp-accounting: pip install 'collm[privacy]'")
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier), rounds)
    return float(accountant.get_epsilon(delta))
