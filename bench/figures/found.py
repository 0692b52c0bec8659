"""What the evaluation has found, and the numbers that page and figures take from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.figures.reckoned import Ideal
from bench.figures.runs import Plan

Result = Mapping[str, Any]
AT = 2  # load at which sharing is shown over time


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page is written from."""

    plan: Plan
    unit: float  # 1x as a scale of the recorded rate
    results: list[dict[str, Any]]  # every policy, load and seed
    served: dict[str, list[list[float]]]
    dispersion: dict[str, float | None]
    ideal: Ideal
    pairs: dict[str, Any]
    completion: dict[str, float]
    split: dict[int, dict[str, Any]]  # load -> name -> result
    adapted: dict[int, dict[str, Any]]
    ablations: dict[str, Any]
    fit: dict[str, Any]
    memory: dict[str, dict[str, float]]
    cost: dict[int, Any]
    cost_requests: int


def values_of(results: Sequence[Result], policy: str, load: int, key: str, tag: str) -> list[float]:
    """One number of one policy at one load, a seed each; of one task if ``tag`` is given."""
    chosen = [r for r in results if r["policy"] == policy and r["load"] == load]
    found = [(r["tags"].get(tag, {}) if tag else r).get(key) for r in chosen]
    return [float(v) for v in found if v is not None]


def mean_of(results: Sequence[Result], policy: str, load: int, key: str, tag: str = "") -> float:
    """Mean over seeds."""
    return statistics.fmean(values_of(results, policy, load, key, tag))


def ratio_to(
    results: Sequence[Result], policy: str, load: int, key: str, tag: str = ""
) -> float | None:
    """Ours over a policy's, of means over seeds; None where that policy was not run or has 0."""
    values = values_of(results, policy, load, key, tag)
    other = statistics.fmean(values) if values else 0.0
    return mean_of(results, "collm", load, key, tag) / other if other > 0 else None


def learners(found: Found) -> dict[str, Result]:
    """Sharing, the isolated design at its best division and no training, at one load."""
    results = found.split[AT]
    isolated = {k: v for k, v in results.items() if k.startswith("split")}
    best = max(isolated, key=lambda k: isolated[k]["q_goodput"])
    return {
        "sharing": results["collm (shared)"],
        f"separate ({best})": isolated[best],
        "no training": found.ablations["B = 0 (no training)"],
    }


def quality(result: Result) -> list[tuple[float, float]]:
    """(minutes, mean quality of the answers in time) by bucket."""
    series = result["by_time"]
    width = series["bucket_seconds"]
    pairs = zip(series["quality_tokens"], series["good_tokens"], strict=False)
    return [
        (k * width / 60, weighted / tokens)
        for k, (weighted, tokens) in enumerate(pairs)
        if tokens > 0
    ]


def fullest(found: Found) -> dict[str, list[float]]:
    """Of each policy what the replica that ended most ended a second, and the ideal levels."""
    both = {policy: max(replicas, key=sum) for policy, replicas in found.served.items()}
    seconds = max(map(len, both.values()))
    levels = {
        f"ideal, {found.ideal.replicas[policy]} replicas": [level] * seconds
        for policy, level in found.ideal.level.items()
    }
    return both | levels
