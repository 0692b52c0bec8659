"""Aggregation of LoRA updates: one plain function a strategy over named NumPy tensors.

The weight change of a module is (lora_alpha / rank) B A (names: ``shared.factors``). Sums run
in float64 in the order of the clients' ids, so a permutation of the clients changes no bit and
one client alone comes back bit-equal. Sources: FedAvg (McMahan 2017) as FedIT uses it for LoRA,
FedProx (Li 2020), FedAdam (Reddi 2021), FFA-LoRA (Sun 2024), RoLoRA (Chen 2024), FlexLoRA (Bai
2024), coordinate median and trimmed mean (Yin 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.factors import (
    AggregationError,
    Array,
    Tensors,
    compress,
    factor,
    pairs,
    squared_norm,
    to_rank,
)

__all__ = ["AggregationError", "Array", "Tensors", "factor", "to_rank"]


@dataclass(frozen=True)
class ClientUpdate:
    """One client's whole adapter after its local training, and what it claims about it."""

    client: str
    round: int
    base: str
    parent: str
    examples: int  # samples trained in the round: the weight n_k
    rank: int
    lora_alpha: float
    tensors: Tensors

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.rank


@dataclass(frozen=True)
class Target:
    """What the server expects of an update: the adapter's identity and shape."""

    round: int
    base: str
    parent: str
    rank: int
    lora_alpha: float
    tensors: Tensors  # the parent version's

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.rank


@dataclass(frozen=True)
class Aggregate:
    """The new adapter, the strategy's server state, and the error of averaging factors apart."""

    tensors: dict[str, Array]
    used: tuple[str, ...]
    rejected: dict[str, str]
    error: float  # ||mean(BA) - B_g A_g|| / ||mean(BA)||
    state: dict[str, Array] = field(default_factory=dict)


def trained_factors(strategy: str, round_number: int) -> tuple[str, ...]:
    """Which factors clients train: FFA only B; RoLoRA B in odd rounds, A in even ones.

    ``round_number`` is the adapter's own count, kept in its versions, so the alternation
    survives restarts.
    """
    if strategy == "ffa":
        return ("B",)
    if strategy == "rolora":
        return ("B",) if round_number % 2 == 1 else ("A",)
    return ("A", "B")


# ---------------------------------------------------------------- admission


def refusal(update: ClientUpdate, target: Target, strategy: str) -> str | None:
    """Why this update must be left out whole; None: it is good."""
    for name in ("round", "base", "parent"):
        found, wanted = getattr(update, name), getattr(target, name)
        if found != wanted:
            return f"{name} {found!r} instead of {wanted!r}"
    if update.examples <= 0:
        return "no examples"
    if strategy != "flexlora":
        if update.rank != target.rank:
            return f"rank {update.rank} instead of {target.rank}: only flexlora joins unequal ranks"
        if update.lora_alpha != target.lora_alpha:
            return f"lora_alpha {update.lora_alpha} instead of {target.lora_alpha}"
    return _bad_tensors(update, target, strategy)


def _bad_tensors(update: ClientUpdate, target: Target, strategy: str) -> str | None:
    missing = sorted(target.tensors.keys() ^ update.tensors.keys())
    if missing:
        return f"{len(missing)} tensors missing or unknown, first {missing[0]!r}"
    frozen = {"A", "B"} - set(trained_factors(strategy, target.round))
    for name, parent in sorted(target.tensors.items()):
        tensor = update.tensors[name]
        wanted = _shape(parent.shape, factor(name), update.rank)
        if tensor.shape != wanted:
            return f"shape of {name!r} is {tensor.shape} instead of {wanted}"
        if not np.isfinite(tensor).all():
            return f"{name!r} holds NaN or infinity"
        if factor(name) in frozen and not np.array_equal(tensor, parent):
            return f"{name!r} was changed, but {strategy} freezes {factor(name)} in this round"
    return None


def _shape(parent: tuple[int, ...], which: str, rank: int) -> tuple[int, ...]:
    return (rank, parent[1]) if which == "A" else (parent[0], rank)


# ---------------------------------------------------------------- strategies

Strategy = Callable[
    [Sequence[ClientUpdate], Target, Mapping[str, Array], Mapping[str, float]],
    tuple[dict[str, Array], dict[str, Array]],
]


def aggregate(
    strategy: str,
    updates: Sequence[ClientUpdate],
    target: Target,
    state: Mapping[str, Array] | None = None,
    options: Mapping[str, float] | None = None,
) -> Aggregate:
    """The new adapter from a round's updates. Raises AggregationError when none is good.

    ``state`` is what the previous round's aggregation returned (empty at first); ``options``
    are the strategy's numbers, see the functions below.
    """
    if strategy not in BY_NAME:
        raise AggregationError(f"unknown strategy {strategy!r}; known: {', '.join(BY_NAME)}")
    rejected, good = {}, []
    for update in sorted(updates, key=lambda u: u.client):
        reason = refusal(update, target, strategy)
        if reason is None:
            good.append(update)
        else:
            rejected[update.client] = reason
    if not good:
        reasons = "; ".join(f"{client}: {reason}" for client, reason in rejected.items())
        raise AggregationError(f"no usable update ({reasons or 'none came'})")
    tensors, new_state = BY_NAME[strategy](good, target, state or {}, options or {})
    if not all(np.isfinite(t).all() for t in tensors.values()):
        raise AggregationError(f"{strategy} produced NaN or infinity")
    averaged = fedavg(good, target, {}, {})[0] if strategy == "fedadam" else tensors
    return Aggregate(
        tensors=tensors,
        used=tuple(u.client for u in good),
        rejected=rejected,
        error=factor_error(good, averaged, target.scaling),
        state=new_state,
    )


def _weighted(updates: Sequence[ClientUpdate], name: str) -> NDArray[np.float64]:
    total = sum(u.examples for u in updates)
    summed = sum(u.tensors[name].astype(np.float64) * u.examples for u in updates)
    return np.asarray(summed / total)


def fedavg(
    updates: Sequence[ClientUpdate],
    target: Target,
    state: Mapping[str, Array],
    options: Mapping[str, float],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """B_g = sum n_k B_k / sum n_k, A_g likewise. FedProx, FFA and RoLoRA aggregate like this:
    they differ in what clients train, and for the latter two the average of B A is exact."""
    return {n: _weighted(updates, n).astype(np.float32) for n in target.tensors}, {}


def fedadam(
    updates: Sequence[ClientUpdate],
    target: Target,
    state: Mapping[str, Array],
    options: Mapping[str, float],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Adam on the server with the mean change as its gradient (Reddi 2021, algorithm 2, with
    Adam's bias correction). Options: server_lr 1e-3, beta1 0.9, beta2 0.99, tau 1e-4."""
    lr, tau = options.get("server_lr", 1e-3), options.get("tau", 1e-4)
    b1, b2 = options.get("beta1", 0.9), options.get("beta2", 0.99)
    t = int(state["t"][0]) + 1 if "t" in state else 1
    out: dict[str, Array] = {}
    new: dict[str, Array] = {"t": np.array([t], dtype=np.float32)}
    for name, parent in target.tensors.items():
        change = _weighted(updates, name) - parent
        m = b1 * state.get(f"m.{name}", np.float32(0)) + (1 - b1) * change
        v = b2 * state.get(f"v.{name}", np.float32(0)) + (1 - b2) * change**2
        step = lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + tau)
        out[name] = (parent + step).astype(np.float32)
        new[f"m.{name}"], new[f"v.{name}"] = m.astype(np.float32), v.astype(np.float32)
    return out, new


def median(
    updates: Sequence[ClientUpdate],
    target: Target,
    state: Mapping[str, Array],
    options: Mapping[str, float],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Coordinate-wise median, all clients alike (Yin 2018)."""
    stacked = {n: np.stack([u.tensors[n] for u in updates]) for n in target.tensors}
    return {n: np.median(s, axis=0).astype(np.float32) for n, s in stacked.items()}, {}


def trimmed_mean(
    updates: Sequence[ClientUpdate],
    target: Target,
    state: Mapping[str, Array],
    options: Mapping[str, float],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Coordinate-wise mean without the lowest and highest floor(trim * K) values (Yin 2018).

    Option trim (default 0.2) is the share cut from each side, below 0.5; all clients alike.
    """
    trim = options.get("trim", 0.2)
    if not 0 <= trim < 0.5:
        raise AggregationError(f"trim {trim}: a share of at least 0 and below 0.5 expected")
    cut = int(trim * len(updates))
    out = {}
    for name in target.tensors:
        ordered = np.sort(np.stack([u.tensors[name] for u in updates]).astype(np.float64), axis=0)
        out[name] = ordered[cut : len(updates) - cut].mean(axis=0).astype(np.float32)
    return out, {}


def flexlora(
    updates: Sequence[ClientUpdate],
    target: Target,
    state: Mapping[str, Array],
    options: Mapping[str, float],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Best rank-r factors of the weighted mean of (lora_alpha_k / r_k) B_k A_k (Bai 2024)."""
    total = sum(u.examples for u in updates)
    out: dict[str, Array] = {}
    for name_a, name_b in pairs(target.tensors):
        wide = np.concatenate([u.tensors[name_b].astype(np.float64) for u in updates], axis=1)
        tall = np.concatenate(
            [
                u.tensors[name_a].astype(np.float64) * (u.examples / total * u.scaling)
                for u in updates
            ],
            axis=0,
        )
        out[name_a], out[name_b] = compress(
            wide, tall / target.scaling, target.rank, target.tensors[name_a]
        )
    return out, {}


BY_NAME: dict[str, Strategy] = {
    "fedavg": fedavg,
    "fedprox": fedavg,
    "fedadam": fedadam,
    "ffa": fedavg,
    "rolora": fedavg,
    "flexlora": flexlora,
    "median": median,
    "trimmed_mean": trimmed_mean,
}


def factor_error(updates: Sequence[ClientUpdate], result: Tensors, scaling: float) -> float:
    """||mean(BA) - B_g A_g|| / ||mean(BA)||, Frobenius norm over all modules; 0 if both vanish.

    Computed from Gram matrices of the stacked factors: no full product is ever formed.
    """
    total = sum(u.examples for u in updates)
    difference = size = 0.0
    for name_a, name_b in pairs(result):
        wide = [u.tensors[name_b].astype(np.float64) for u in updates]
        tall = [
            u.tensors[name_a].astype(np.float64) * (u.examples / total * u.scaling) for u in updates
        ]
        size += squared_norm(wide, tall)
        wide.append(result[name_b].astype(np.float64))
        tall.append(result[name_a].astype(np.float64) * -scaling)
        difference += squared_norm(wide, tall)
    if size == 0.0:
        return 0.0
    return float(np.sqrt(max(difference, 0.0) / size))
