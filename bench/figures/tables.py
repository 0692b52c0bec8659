"""The page's tables, each from the results alone, in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures import reckoned
from bench.figures.found import Found, Result, ratio_to, values_of
from bench.figures.reckoned import fluid_bound
from bench.figures.runs import LOADS, Plan, policies
from shared import profile

GOODPUT = "goodput_tokens_per_s"
# Goodput of CoLLM over a baseline at 4x, as the paper reports it.
PAPER = {
    "code": {"dlora": 1.16, "shepherd": 1.25, "peft": 1.37},
    "conv": {"dlora": 1.10, "shepherd": 1.15, "peft": 1.51},
}
PAPER_Q = {1: "up to 1.68", 3: "2.2"}  # Q-goodput over PEFT on conversation, by load
Q_AIM = {3: 2.5}
BOUND_AIM, Q_BOUND_AIM = 0.90, 0.85  # of the fluid bound; of it times the quality at the end
INTERVAL_LIMIT = 0.05  # of an interval's time, the paper's worst
LEARNED = {
    "goodput": GOODPUT,
    "Q-goodput": "q_goodput",
    "attainment": "slo_attainment",
    "rounds": "training.rounds",
    "samples learnt/s": "training.samples_per_s",
    "share training": "training.compute_share",
}
ADAPTED = {
    "goodput": GOODPUT,
    "attainment": "slo_attainment",
    "code: goodput": f"tags.code.{GOODPUT}",
    "code: attainment": "tags.code.slo_attainment",
    "conv: attainment": "tags.conv.slo_attainment",
    "p99 TTFT, ms": "p99_ttft_ms",
}


def judged(value: float, form: str, least: float = -math.inf, most: float = math.inf) -> str:
    """The value, and whether it misses what was aimed at."""
    text = f"{value:{form}}"
    return text if least <= value <= most else f"{text} **missed**"


def table(results: Sequence[Result], key: str, form: str, tag: str = "") -> str:
    """Policies by loads; with several seeds mean and half the range."""
    lines = [
        "| policy | " + " | ".join(f"{load}x" for load in LOADS) + " |",
        "|---" * (len(LOADS) + 1) + "|",
    ]
    for policy in policies():
        cells = []
        for load in LOADS:
            values = values_of(results, policy, load, key, tag)
            spread = (max(values) - min(values)) / 2
            more = f" ± {spread:{form}}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):{form}}{more}")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(results: Sequence[Result]) -> str:
    """Ours over every baseline, by task and load, beside the paper's figure."""
    head = " | ".join(f"{load}x" for load in LOADS)
    lines = [f"| task | baseline | {head} | paper (4x) |", "|---" * (len(LOADS) + 3) + "|"]
    for tag, paper in PAPER.items():
        for policy in policies():
            if policy == "collm":
                continue
            cells = []
            for load in LOADS:
                value = ratio_to(results, policy, load, GOODPUT, tag)
                ratio = "∞" if value is None else f"{value:.2f}"
                cells.append(f"**{ratio}**" if ratio.startswith("0") else ratio)
            row = " | ".join(cells)
            lines.append(f"| {tag} | {policy} | {row} | {paper.get(policy, '–')} |")
    return "\n".join(lines)


def over_peft(results: Sequence[Result]) -> str:
    """Q-goodput over ``peft`` on conversation alone, beside the aim and the paper's figure."""
    lines = ["| load | collm / peft | aim | paper |", "|---|---|---|---|"]
    for load in LOADS:
        value, aim = ratio_to(results, "peft", load, "q_goodput", "conv"), Q_AIM.get(load)
        least = -math.inf if aim is None else aim
        text = "–" if value is None else judged(value, ".2f", least=least)
        lines.append(f"| {load}x | {text} | {aim or '–'} | {PAPER_Q.get(load, '–')} |")
    return "\n".join(lines)


def bounds(plan: Plan, results: Sequence[Result]) -> str:
    """Goodput and Q-goodput against what any policy could reach."""
    lines = [
        "| load | goodput / fluid bound | Q-goodput / (bound x best quality) |",
        "|---|---|---|",
    ]
    for load in LOADS:
        mine = [r for r in results if r["policy"] == "collm" and r["load"] == load]
        shares = [r[GOODPUT] / fluid_bound(plan, r) for r in mine]
        quality = [
            r["q_goodput"] / (fluid_bound(plan, r) * r["training"]["quality_at_end"]) for r in mine
        ]
        goodput = judged(statistics.fmean(shares), ".3f", least=BOUND_AIM)
        weighted = judged(statistics.fmean(quality), ".3f", least=Q_BOUND_AIM)
        lines.append(f"| {load}x | {goodput} | {weighted} |")
    return "\n".join(lines)


def training(results: Sequence[Result]) -> str:
    """What training got and brought by load."""
    lines = [
        "| load | share of compute that trains | samples learnt/s | quality at the end |",
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


def lulls(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Load -> policy -> utilisation in a lull, mean over seeds."""
    return {
        f"{load}x": {
            policy: statistics.fmean(
                reckoned.lull(r) for r in results if r["policy"] == policy and r["load"] == load
            )
            for policy in policies()
        }
        for load in LOADS
    }


def lull(results: Sequence[Result]) -> str:
    """Utilisation in a lull: ours, and the largest and smallest of the baselines'."""
    lines = ["| load | collm | baselines |", "|---|---|---|"]
    for load, found in lulls(results).items():
        others = [value for policy, value in found.items() if policy != "collm"]
        lines.append(f"| {load} | {found['collm']:.0%} | {min(others):.0%} to {max(others):.0%} |")
    return "\n".join(lines)


def ideal(found: Found) -> str:
    """Ideal mode: its level, and how far what the fullest replica ended is from it."""
    lines = [
        "| policy | replicas in use | λ, requests/s each | τ, s | b* | distance |",
        "|---" * 6 + "|",
    ]
    for policy, level in found.ideal.level.items():
        ended = max(found.served[policy], key=sum)
        mode = found.ideal
        lines.append(
            f"| {policy} | {mode.replicas[policy]} | {level:.2f} | {mode.seconds[policy]:.2f} | "
            f"{mode.in_flight[policy]:.1f} | {reckoned.distance(ended, level):.2f} |"
        )
    return "\n".join(lines)


def overhead(results: Sequence[Result]) -> str:
    """Pacing (virtual time) and deciding (this machine's processor) by load."""
    lines = [
        "| load | held back on purpose | worst interval | deciding | a decision, ms |",
        "|---|---|---|---|---|",
    ]
    for load in LOADS:
        mine = [r["overhead"] for r in results if r["policy"] == "collm" and r["load"] == load]
        keys = ("hold_share", "decision_share", "decision_ms")
        hold, share, ms = (statistics.fmean(o[key] for o in mine) for key in keys)
        worst = judged(max(o["hold_share_worst"] for o in mine), ".2%", most=INTERVAL_LIMIT)
        lines.append(f"| {load}x | {hold:.2%} | {worst} | {share:.3%} | {ms:.3f} |")
    return "\n".join(lines)


def named(results: Mapping[str, Result], keys: Mapping[str, str]) -> str:
    """A row a result, the given keys as columns (title -> key, dots go deeper)."""
    lines = ["| | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, result in results.items():
        cells = [_cell(result, key) for key in keys.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Result, key: str) -> str:
    value: Any = result
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "–" if value is None else f"{value:,.4g}"


def by_load(
    results: Mapping[int, Mapping[str, Result]], keys: Mapping[str, str], paper: str = ""
) -> str:
    """A table a load: ``named`` with ours, the first row's goodput, over each other's."""
    parts = []
    for load, at in results.items():
        over = {name: {**r, "over": over_first(at, name)} for name, r in at.items()}
        ratio = {f"goodput, collm / this{paper}": "over"}
        parts.append(f"At {load}x:\n\n{named(over, {**keys, **ratio})}")
    return "\n\n".join(parts)


def over_first(results: Mapping[str, Result], name: str) -> float | None:
    """The first row's goodput over that of ``name``; None for itself and where that has none."""
    first = next(iter(results))
    other = results[name][GOODPUT]
    return results[first][GOODPUT] / other if name != first and other > 0 else None


def second_copy(plan: Plan, memory: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What another copy of the base costs: seconds, GB, and that over all of one copy's GB."""
    shared, apart = (sum(memory[k].values()) for k in ("one copy (CoLLM)", "a copy each"))
    return {
        "load_seconds": profile.load(plan.profile).load_seconds,
        "gb": apart - shared,
        "share": (apart - shared) / shared,
    }
