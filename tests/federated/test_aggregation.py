"""Aggregation against independent references, and the invariants that every strategy keeps."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import rounds
from shared.aggregation import (
    BY_NAME,
    AggregationError,
    ClientUpdate,
    Target,
    aggregate,
    to_rank,
    trained_factors,
)

SHAPES = {"q_proj": (12, 20), "v_proj": (5, 20)}  # out x in: not square
AVERAGING = ("fedavg", "fedprox", "ffa", "rolora")


def name(module: str, which: str) -> str:
    return f"base_model.model.layers.0.{module}.lora_{which}.weight"


def tensors(rng: np.random.Generator, rank: int = 4, scale: float = 1.0) -> dict[str, np.ndarray]:
    out = {}
    for module, (rows, columns) in SHAPES.items():
        out[name(module, "A")] = rng.normal(size=(rank, columns)).astype(np.float32) * scale
        out[name(module, "B")] = rng.normal(size=(rows, rank)).astype(np.float32) * scale
    return out


def target(rng: np.random.Generator, rank: int = 4, alpha: float = 8.0, rnd: int = 1) -> Target:
    return Target(rnd, "m", "r0", rank, alpha, tensors(rng, rank))


def update(
    rng: np.random.Generator,
    goal: Target,
    client: str = "c0",
    examples: int = 10,
    rank: int | None = None,
    strategy: str = "fedavg",
) -> ClientUpdate:
    made = tensors(rng, rank or goal.rank)
    for key in made:
        if key.split("lora_")[1][0] not in trained_factors(strategy, goal.round):
            made[key] = goal.tensors[key]
    return ClientUpdate(
        client, goal.round, "m", "r0", examples, rank or goal.rank, goal.lora_alpha, made
    )


def product(t: dict[str, np.ndarray], module: str) -> np.ndarray:
    return t[name(module, "B")].astype(np.float64) @ t[name(module, "A")].astype(np.float64)


@pytest.mark.parametrize("strategy", AVERAGING)
def test_averages_equal_numpys_weighted_average(strategy: str) -> None:
    rng = np.random.default_rng(1)
    goal = target(rng)
    updates = [update(rng, goal, f"c{i}", 3 + 7 * i, strategy=strategy) for i in range(4)]
    result = aggregate(strategy, updates, goal)
    for key in goal.tensors:
        stacked = np.stack([u.tensors[key].astype(np.float64) for u in updates])
        wanted = np.average(stacked, axis=0, weights=[u.examples for u in updates])
        np.testing.assert_allclose(result.tensors[key], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", [*AVERAGING, "median", "trimmed_mean"])
def test_one_client_in_is_the_same_client_out_to_the_last_bit(strategy: str) -> None:
    rng = np.random.default_rng(2)
    goal = target(rng)
    alone = update(rng, goal, examples=7, strategy=strategy)
    result = aggregate(strategy, [alone], goal)
    for key in goal.tensors:
        assert np.array_equal(result.tensors[key], alone.tensors[key])
    assert result.error < 1e-6


def test_every_strategy_that_may_be_asked_for_is_there() -> None:
    assert tuple(BY_NAME) == rounds.STRATEGIES, "shared/rounds.py names others"


@pytest.mark.parametrize("strategy", list(BY_NAME))
def test_the_order_of_the_clients_changes_no_bit(strategy: str) -> None:
    rng = np.random.default_rng(3)
    goal = target(rng)
    updates = [update(rng, goal, f"c{i}", 2 + i, strategy=strategy) for i in range(4)]
    first = aggregate(strategy, updates, goal)
    for order in itertools.islice(itertools.permutations(updates), 1, 8):
        again = aggregate(strategy, order, goal)
        for key in goal.tensors:
            assert np.array_equal(first.tensors[key], again.tensors[key])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
    st.sampled_from(AVERAGING),
)
def test_an_average_stays_between_its_clients(weights: list[int], seed: int, strategy: str) -> None:
    rng = np.random.default_rng(seed)
    goal = target(rng)
    updates = [update(rng, goal, f"c{i}", w, strategy=strategy) for i, w in enumerate(weights)]
    result = aggregate(strategy, updates, goal)
    for key in goal.tensors:
        stacked = np.stack([u.tensors[key] for u in updates])
        assert (result.tensors[key] >= stacked.min(axis=0) - 1e-6).all()
        assert (result.tensors[key] <= stacked.max(axis=0) + 1e-6).all()


def test_fedadam_equals_a_reference_over_rounds_with_its_state_carried() -> None:
    rng = np.random.default_rng(4)
    goal = target(rng)
    key = name("q_proj", "B")
    m = v = np.zeros_like(goal.tensors[key], dtype=np.float64)
    x = goal.tensors[key].astype(np.float64)
    state: dict[str, np.ndarray] = {}
    options = {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    for t in range(1, 4):
        updates = [update(rng, goal, f"c{i}", 1 + i) for i in range(3)]
        result = aggregate("fedadam", updates, goal, state, options)
        gradient = np.average([u.tensors[key] for u in updates], axis=0, weights=[1, 2, 3]) - x
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        x = x + 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-3)
        np.testing.assert_allclose(result.tensors[key], x, rtol=1e-4, atol=1e-6)
        goal, state = replace(goal, tensors=result.tensors), result.state
        assert state["t"][0] == t


def test_median_and_trimmed_mean_equal_numpy_and_scipy_and_ignore_an_attacker() -> None:
    from scipy.stats import trim_mean  # a second of imports that no other test here needs

    rng = np.random.default_rng(5)
    goal = target(rng)
    updates = [update(rng, goal, f"c{i}") for i in range(5)]
    evil = replace(updates[4], tensors={k: t * 1e6 for k, t in updates[4].tensors.items()})
    updates[4] = evil
    for key in goal.tensors:
        stacked = np.stack([u.tensors[key].astype(np.float64) for u in updates])
        got = aggregate("median", updates, goal).tensors[key]
        np.testing.assert_allclose(got, np.median(stacked, axis=0), rtol=1e-6)
        got = aggregate("trimmed_mean", updates, goal, options={"trim": 0.2}).tensors[key]
        np.testing.assert_allclose(got, trim_mean(stacked, 0.2, axis=0), rtol=1e-5)
        assert np.abs(got).max() < 10


def test_flexlora_is_the_best_approximation_of_the_mean_product() -> None:
    rng = np.random.default_rng(6)
    goal = target(rng, rank=4)
    updates = [update(rng, goal, f"c{i}", 1 + i) for i in range(3)]
    result = aggregate("flexlora", updates, goal)
    for module in SHAPES:
        mean = np.average([product(u.tensors, module) for u in updates], axis=0, weights=[1, 2, 3])
        u, s, vt = np.linalg.svd(mean)
        best = (u[:, :4] * s[:4]) @ vt[:4]
        np.testing.assert_allclose(product(result.tensors, module), best, atol=1e-4)


def test_flexlora_gives_one_client_its_own_product_back_not_its_transpose() -> None:
    """APPFL#398: an SVD of the transpose handed clients the transposed product."""
    rng = np.random.default_rng(7)
    goal = target(rng)
    alone = update(rng, goal)
    result = aggregate("flexlora", [alone], goal)
    for module in SHAPES:
        got, wanted = product(result.tensors, module), product(alone.tensors, module)
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert result.error < 1e-6


def test_ranks_4_and_8_together_are_refused_by_fedavg_and_joined_by_flexlora() -> None:
    rng = np.random.default_rng(8)
    goal = target(rng, rank=8, alpha=16.0)
    updates = [update(rng, goal, "c0", rank=8), replace(update(rng, goal, "c1", rank=4))]
    result = aggregate("fedavg", updates, goal)
    assert result.used == ("c0",)
    assert "rank 4 instead of 8: only flexlora" in result.rejected["c1"]
    joined = aggregate("flexlora", updates, goal)
    assert joined.used == ("c0", "c1")
    for module in SHAPES:
        # alpha / r is 2 for rank 8 and 4 for rank 4
        mean = 0.5 * 2 * product(updates[0].tensors, module)
        mean += 0.5 * 4 * product(updates[1].tensors, module)
        u, s, vt = np.linalg.svd(mean)
        k = min(8, len(s))
        best = (u[:, :k] * s[:k]) @ vt[:k]
        np.testing.assert_allclose(2 * product(joined.tensors, module), best, atol=1e-4)


def test_flexlora_keeps_directions_without_weight_able_to_learn() -> None:
    """With A and B both zero a direction would have no gradient for ever."""
    rng = np.random.default_rng(9)
    goal = target(rng)
    for key in goal.tensors:
        if "lora_B" in key:
            goal.tensors[key][:] = 0
    still = replace(update(rng, goal), tensors=goal.tensors)
    result = aggregate("flexlora", [still], goal)
    for module in SHAPES:
        assert not result.tensors[name(module, "B")].any()
        assert (np.abs(result.tensors[name(module, "A")]).sum(axis=1) > 0).all()


def test_changing_the_rank_keeps_the_product_when_it_fits() -> None:
    rng = np.random.default_rng(10)
    small = tensors(rng, rank=4)
    wide = to_rank(small, 8)
    for module in SHAPES:
        assert wide[name(module, "A")].shape[0] == 8
        np.testing.assert_allclose(product(wide, module), product(small, module), atol=1e-4)
    back = to_rank(wide, 4)
    for module in SHAPES:
        np.testing.assert_allclose(product(back, module), product(small, module), atol=1e-4)


def test_the_error_of_averaging_factors_apart_is_measured() -> None:
    rng = np.random.default_rng(11)
    goal = target(rng)
    updates = [update(rng, goal, f"c{i}", 1 + i) for i in range(3)]
    result = aggregate("fedavg", updates, goal)
    wanted = []
    for module in SHAPES:
        mean = np.average([product(u.tensors, module) for u in updates], axis=0, weights=[1, 2, 3])
        wanted.append((mean, product(result.tensors, module)))
    above = np.sqrt(sum(np.sum((m - p) ** 2) for m, p in wanted))
    below = np.sqrt(sum(np.sum(m**2) for m, _ in wanted))
    assert result.error == pytest.approx(above / below, rel=1e-5)
    assert result.error > 0.1
    for strategy, rnd in (("ffa", 1), ("rolora", 1), ("rolora", 2)):
        goal = target(rng, rnd=rnd)
        exact = [update(rng, goal, f"c{i}", 1 + i, strategy=strategy) for i in range(3)]
        assert aggregate(strategy, exact, goal).error < 1e-6


def broken(kind: str, good: ClientUpdate) -> ClientUpdate:
    key = name("q_proj", "B")
    spoiled = {k: t.copy() for k, t in good.tensors.items()}
    if kind == "nan":
        spoiled[key][0, 0] = np.nan
    elif kind == "infinity":
        spoiled[key][0, 0] = np.inf
    elif kind == "shape":
        spoiled[key] = spoiled[key].T.copy()
    elif kind == "missing":
        del spoiled[key]
    elif kind == "unknown":
        spoiled[name("k_proj", "A")] = spoiled[key]
    changed: dict[str, ClientUpdate] = {
        "round": replace(good, round=2),
        "base": replace(good, base="other"),
        "parent": replace(good, parent="r7"),
        "no examples": replace(good, examples=0),
        "lora_alpha": replace(good, lora_alpha=99.0),
        "rank": replace(good, rank=5),
    }
    return changed.get(kind, replace(good, tensors=spoiled))


FAULTS = (
    *("nan", "infinity", "shape", "missing", "unknown"),
    *("round", "base", "parent", "no examples", "lora_alpha", "rank"),
)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("strategy", ["fedavg", "fedadam", "median"])
def test_a_bad_update_is_left_out_whole(kind: str, strategy: str) -> None:
    rng = np.random.default_rng(12)
    goal = target(rng)
    good = [update(rng, goal, f"c{i}", 5) for i in range(2)]
    bad = replace(broken(kind, update(rng, goal, "bad")), client="bad")
    with_it = aggregate(strategy, [*good, bad], goal)
    without = aggregate(strategy, good, goal)
    assert set(with_it.rejected) == {"bad"}
    assert with_it.used == ("c0", "c1")
    for key in goal.tensors:
        assert np.array_equal(with_it.tensors[key], without.tensors[key])


def test_all_clients_with_zero_examples_fail_the_round() -> None:
    """flower#7645: the sum of no weights became a NaN model that was handed out."""
    rng = np.random.default_rng(13)
    goal = target(rng)
    empty = [update(rng, goal, f"c{i}", 0) for i in range(2)]
    with pytest.raises(AggregationError, match="c0: no examples; c1: no examples"):
        aggregate("fedavg", empty, goal)
    with pytest.raises(AggregationError, match="none came"):
        aggregate("fedavg", [], goal)


@pytest.mark.parametrize(("strategy", "rnd"), [("ffa", 3), ("rolora", 1), ("rolora", 2)])
def test_a_client_that_moved_a_frozen_factor_is_left_out(strategy: str, rnd: int) -> None:
    rng = np.random.default_rng(14)
    goal = target(rng, rnd=rnd)
    good = update(rng, goal, "good", strategy=strategy)
    bad = replace(update(rng, goal, "bad", strategy="fedavg"))
    result = aggregate(strategy, [good, bad], goal)
    assert result.used == ("good",)
    assert "freezes" in result.rejected["bad"]


def test_rolora_alternates_by_the_adapters_round_number() -> None:
    assert [trained_factors("rolora", r) for r in (1, 2, 3)] == [("B",), ("A",), ("B",)]
    assert trained_factors("ffa", 2) == ("B",)
    assert trained_factors("fedavg", 2) == ("A", "B")


def flower(function: str, arrays: Sequence[tuple[list[np.ndarray], int]], *more: float) -> object:
    pytest.importorskip("flwr", reason="Flower is not installed (pip install flwr to compare)")
    module = importlib.import_module("flwr.server.strategy.aggregate")
    return getattr(module, function)(arrays, *more)


@pytest.mark.parametrize(
    ("strategy", "function", "more"),
    [
        ("fedavg", "aggregate", ()),
        ("median", "aggregate_median", ()),
        ("trimmed_mean", "aggregate_trimmed_avg", (0.2,)),
    ],
)
def test_results_equal_flowers(strategy: str, function: str, more: tuple[float, ...]) -> None:
    rng = np.random.default_rng(15)
    goal = target(rng)
    updates = [update(rng, goal, f"c{i}", 1 + 3 * i) for i in range(5)]
    keys = sorted(goal.tensors)
    theirs = flower(function, [([u.tensors[k] for k in keys], u.examples) for u in updates], *more)
    assert isinstance(theirs, list)
    ours = aggregate(strategy, updates, goal).tensors
    for key, array in zip(keys, theirs, strict=True):
        np.testing.assert_allclose(ours[key], array, rtol=1e-5, atol=1e-6)
