"""docs/evaluation/README.md: each figure with its numbers and what it says."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures.runs import LOADS, Plan, fluid_bound

Result = Mapping[str, Any]

# Goodput of CoLLM over a baseline at 4x, as the paper reports it.
PAPER = {
    "code": {"dlora": 1.16, "shepherd": 1.25, "peft": 1.37},
    "conv": {"dlora": 1.10, "shepherd": 1.15, "peft": 1.51},
}


def mean_of(results: Sequence[Result], policy: str, load: int, key: str, tag: str = "") -> float:
    """Mean over seeds of one number of one policy at one load."""
    chosen = [r for r in results if r["policy"] == policy and r["load"] == load]
    values = [(r["tags"].get(tag, {}) if tag else r).get(key) for r in chosen]
    return statistics.fmean(v for v in values if v is not None)


def table(results: Sequence[Result], policies: Sequence[str], key: str, form: str) -> str:
    """Policies by loads."""
    lines = [
        "| policy | " + " | ".join(f"{load}x" for load in LOADS) + " |",
        "|---" * (len(LOADS) + 1) + "|",
    ]
    for policy in policies:
        cells = (format(mean_of(results, policy, load, key), form) for load in LOADS)
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(results: Sequence[Result], policies: Sequence[str], load: int) -> str:
    """Ours over every baseline, by task, beside the paper's figure."""
    lines = ["| task | baseline | ours / baseline | paper (4x) |", "|---|---|---|---|"]
    for tag, paper in PAPER.items():
        ours = mean_of(results, "collm", load, "goodput_tokens_per_s", tag)
        for policy in policies:
            if policy == "collm":
                continue
            other = mean_of(results, policy, load, "goodput_tokens_per_s", tag)
            ratio = f"{ours / other:.2f}" if other > 0 else "∞"
            lines.append(f"| {tag} | {policy} | {ratio} | {paper.get(policy, '–')} |")
    return "\n".join(lines)


def bounds(plan: Plan, results: Sequence[Result]) -> str:
    """Goodput against what any policy could reach (all requests counted, late ones too)."""
    lines = ["| load | goodput / fluid bound |", "|---|---|"]
    for load in LOADS:
        mine = [r for r in results if r["policy"] == "collm" and r["load"] == load]
        shares = [r["goodput_tokens_per_s"] / fluid_bound(plan, dict(r)) for r in mine]
        lines.append(f"| {load}x | {statistics.fmean(shares):.3f} |")
    return "\n".join(lines)


def training(results: Sequence[Result]) -> str:
    """What training got and brought, by load."""
    lines = [
        "| load | share of compute that trains | samples/s | quality at the end |",
        "|---|---|---|---|",
    ]
    for load in LOADS:
        mine = [r["training"] for r in results if r["policy"] == "collm" and r["load"] == load]
        cells = [
            statistics.fmean(t[key] for t in mine)
            for key in ("compute_share", "samples_per_s", "quality_at_end")
        ]
        lines.append(f"| {load}x | {cells[0]:.1%} | {cells[1]:.1f} | {cells[2]:.3f} |")
    return "\n".join(lines)


def named(results: Mapping[str, Result], keys: Mapping[str, str]) -> str:
    """A row a result, the given keys as columns (title -> key, dots go deeper)."""
    lines = ["| | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, result in results.items():
        cells = []
        for key in keys.values():
            value: Any = result
            for part in key.split("."):
                value = value[part]
            cells.append(f"{value:,.4g}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
