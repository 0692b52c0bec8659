"""docs/evaluation/README.md: each figure with its numbers and what it says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from bench.figures.runs import LOADS, Plan, fluid_bound, policies
from bench.figures.text import CAUTION, TEXT
from sim.rounds import Federated
from sim.scenario import load_curve

Result = Mapping[str, Any]

# Goodput of CoLLM over a baseline at 4x, as the paper reports it.
PAPER = {
    "code": {"dlora": 1.16, "shepherd": 1.25, "peft": 1.37},
    "conv": {"dlora": 1.10, "shepherd": 1.15, "peft": 1.51},
}
# Last point that a loss curve was fitted to: samples, cross-entropy (docs/performance.md).
FITTED = {"smollm2": (1116, 1.229)}
BOUND_AIM, Q_BOUND_AIM = 0.90, 0.85  # of the fluid bound; of it times the quality at the end
INTERVAL_LIMIT = 0.05  # of an interval's time, the paper's worst
VARIANCE_AIM = 1 / 3  # of round robin's
LEARNED = {
    "Q-goodput": "q_goodput",
    "attainment": "slo_attainment",
    "rounds": "training.rounds",
    "samples learnt/s": "training.samples_per_s",
    "share training": "training.compute_share",
}


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page is written from."""

    plan: Plan
    unit: float  # 1x as a scale of the recorded rate
    results: list[dict[str, Any]]  # every policy, load and seed
    served: dict[str, list[list[float]]]
    dispersion: dict[str, float]
    pairs: dict[str, Any]
    completion: dict[str, float]
    split: dict[str, Any]
    ablations: dict[str, Any]
    fit: dict[str, Any]
    memory: dict[str, dict[str, float]]
    cost: dict[int, Any]
    cost_requests: int


def facts(found: Found) -> dict[str, Any]:
    """The numbers as plain JSON, without series."""
    bare = [{k: v for k, v in r.items() if k not in ("by_time", "scenario")} for r in found.results]
    return {
        "unit_scale": found.unit,
        "served_dispersion": found.dispersion,
        "completion": found.completion,
        "fit": found.fit["planes"],
        "memory_gb": found.memory,
        "cost": found.cost,
        "rows": bare,
    }


def values_of(results: Sequence[Result], policy: str, load: int, key: str, tag: str) -> list[float]:
    """One number of one policy at one load, a seed each; of one task if ``tag`` is given."""
    chosen = [r for r in results if r["policy"] == policy and r["load"] == load]
    found = [(r["tags"].get(tag, {}) if tag else r).get(key) for r in chosen]
    return [float(v) for v in found if v is not None]


def mean_of(results: Sequence[Result], policy: str, load: int, key: str, tag: str = "") -> float:
    """Mean over seeds."""
    return statistics.fmean(values_of(results, policy, load, key, tag))


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
    key = "goodput_tokens_per_s"
    head = " | ".join(f"{load}x" for load in LOADS)
    lines = [f"| task | baseline | {head} | paper (4x) |", "|---" * (len(LOADS) + 3) + "|"]
    for tag, paper in PAPER.items():
        for policy in policies():
            if policy == "collm":
                continue
            cells = []
            for load in LOADS:
                other = mean_of(results, policy, load, key, tag)
                ours = mean_of(results, "collm", load, key, tag)
                ratio = f"{ours / other:.2f}" if other > 0 else "∞"
                cells.append(f"**{ratio}**" if ratio.startswith("0") else ratio)
            row = " | ".join(cells)
            lines.append(f"| {tag} | {policy} | {row} | {paper.get(policy, '–')} |")
    return "\n".join(lines)


def judged(value: float, form: str, least: float = -math.inf, most: float = math.inf) -> str:
    """The value, and whether it misses what was aimed at."""
    text = f"{value:{form}}"
    return text if least <= value <= most else f"{text} **missed**"


def caution(found: Found) -> str:
    """How far the loss curve is carried beyond what it was fitted to."""
    plan = found.plan
    if plan.curve not in FITTED:
        return (
            f"Quality comes from the loss curve `{plan.curve}` (`config/curves`): "
            f"{load_curve(plan.curve).source}."
        )
    curve = load_curve(plan.curve)
    samples, loss = FITTED[plan.curve]
    ours = [r["training"] for r in found.results if r["policy"] == "collm" and r["load"] == 1]
    learnt = statistics.fmean(t["samples"] for t in ours)
    held = plan.replicas * Federated().samples
    passes = statistics.fmean(t["micro_steps"] for t in ours) / held  # of one sample at least
    ends = 1 / statistics.fmean(t["quality_at_end"] for t in ours)
    fall = (curve.start - curve.floor) / (1 - curve.floor)
    one = curve.scale * (fall ** (1 / curve.power) - 1)  # samples to a cross-entropy of 1
    return CAUTION.format(
        curve=plan.curve,
        samples=samples,
        loss=loss,
        learnt=round(learnt, -3),
        ends=ends,
        one=round(one, -3),
        beyond=one / samples,
        seen=1 / loss,
        initial=1 / curve.start,
        gain=curve.start / loss,
        each=Federated().samples,
        passes=int(passes),
    )


def bounds(plan: Plan, results: Sequence[Result]) -> str:
    """Goodput and Q-goodput against what any policy could reach."""
    lines = [
        "| load | goodput / fluid bound | Q-goodput / (bound x best quality) |",
        "|---|---|---|",
    ]
    for load in LOADS:
        mine = [r for r in results if r["policy"] == "collm" and r["load"] == load]
        shares = [r["goodput_tokens_per_s"] / fluid_bound(plan, dict(r)) for r in mine]
        quality = [
            r["q_goodput"] / (fluid_bound(plan, dict(r)) * r["training"]["quality_at_end"])
            for r in mine
        ]
        goodput = judged(statistics.fmean(shares), ".3f", least=BOUND_AIM)
        weighted = judged(statistics.fmean(quality), ".3f", least=Q_BOUND_AIM)
        lines.append(f"| {load}x | {goodput} | {weighted} |")
    return "\n".join(lines)


def training(results: Sequence[Result]) -> str:
    """What training got and brought, and what deciding cost, by load."""
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


def learners(found: Found) -> dict[str, Result]:
    """Sharing, the isolated design and no training, at 2x."""
    isolated = {k: v for k, v in found.split.items() if k.startswith("split")}
    best = max(isolated, key=lambda k: isolated[k]["q_goodput"])
    return {
        "sharing": found.split["collm (shared)"],
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


def write(found: Found) -> str:
    """The whole page."""
    plan, results = found.plan, found.results
    planes = found.fit["planes"]
    robin = found.dispersion["round_robin"]
    return TEXT.format(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        replicas=plan.replicas,
        profile=plan.profile,
        hours=plan.hours,
        source="the given traces" if plan.traces else "random streams with the traces' statistics",
        seeds=len(plan.seeds),
        unit=found.unit,
        caution=caution(found),
        initial=1 / load_curve(plan.curve).start,
        goodput=table(results, "goodput_tokens_per_s", ",.0f"),
        attainment=table(results, "slo_attainment", ".3f"),
        ratios=ratios(results),
        bounds=bounds(plan, results),
        q_goodput=table(results, "q_goodput", ",.0f"),
        ttft=table(results, "p99_ttft_ms", ",.0f"),
        training=training(results),
        pacing=judged(
            found.dispersion["collm"] / robin if robin else math.nan, ".2f", most=VARIANCE_AIM
        ),
        pacing_fullest=judged(
            found.dispersion["collm, fullest"] / found.dispersion["round_robin, fullest"],
            ".2f",
            most=VARIANCE_AIM,
        ),
        pairs=named(found.pairs, LEARNED),
        jct=" | ".join(f"{k}: {v:.2f}" for k, v in found.completion.items()),
        split=named(found.split, LEARNED),
        above="\n".join(
            f"| {k} | {v['above_one_share']:.1%} |" for k, v in learners(found).items()
        ),
        fit="\n".join(
            f"| {k} | {v['samples']} | {v['r2']:.3f} | {v['r2_single']:.3f} |"
            for k, v in planes.items()
            if v
        ),
        memory="\n".join(
            f"| {k} | {sum(v.values()):.0f} | {v['base weights']:.0f} | {v['KV']:.0f} |"
            for k, v in found.memory.items()
        ),
        overhead=overhead(results),
        ablations=named(found.ablations, LEARNED),
        cost_requests=f"{found.cost_requests:,}",
        cost="\n".join(
            f"| {k} | {v['requests_s']:,.0f} | {v['cpu_s']:.0f} |" for k, v in found.cost.items()
        ),
    )
