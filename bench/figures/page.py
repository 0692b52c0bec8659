"""docs/evaluation/README.md: each figure with its numbers and what it says."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime

from bench.figures import runs, tables
from bench.figures.found import Found, learners
from bench.figures.text import CAUTION, TEXT
from sim.rounds import Federated
from sim.scenario import load_curve

VARIANCE_AIM = 1 / 3  # of round robin's


EXTRAPOLATED = "**all but the first minutes is extrapolated**"


def caution(found: Found) -> str:
    """How far the loss curve is carried beyond what it was fitted to."""
    plan = found.plan
    curve = load_curve(plan.curve)
    if curve.last is None:
        return (
            f"Quality comes from the loss curve `{plan.curve}` (`config/curves`): {curve.source}."
        )
    samples, loss = curve.last
    ours = [r["training"] for r in found.results if r["policy"] == "collm" and r["load"] == 1]
    learnt = statistics.fmean(t["samples"] for t in ours)
    held = plan.replicas * Federated().samples
    passes = statistics.fmean(t["micro_steps"] for t in ours) / held  # of one sample at least
    ends = 1 / statistics.fmean(t["quality_at_end"] for t in ours)
    fall = (curve.start - curve.floor) / (1 - curve.floor)
    one = curve.scale * (fall ** (1 / curve.power) - 1)  # samples to a cross-entropy of 1
    return CAUTION.format(
        curve=plan.curve,
        samples=int(samples),
        loss=loss,
        learnt=round(learnt, -3),
        ends=ends,
        beyond_it=EXTRAPOLATED if learnt > samples else "no more than was seen",
        one=round(one, -3),
        beyond=one / samples,
        seen=1 / loss,
        initial=1 / curve.start,
        gain=curve.start / loss,
        each=Federated().samples,
        passes=int(passes),
    )


def pacing(found: Found, which: str = "") -> str:
    """Relative variance of what a replica ended a second, ours over round robin's."""
    ours, robin = (found.dispersion[f"{name}{which}"] for name in ("collm", "round_robin"))
    ratio = ours / robin if robin and ours is not None else math.nan
    return tables.judged(ratio, ".2f", most=VARIANCE_AIM)


def write(found: Found) -> str:
    """The whole page."""
    plan, results = found.plan, found.results
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
        goodput=tables.table(results, tables.GOODPUT, ",.0f"),
        attainment=tables.table(results, "slo_attainment", ".3f"),
        ratios=tables.ratios(results),
        bounds=tables.bounds(plan, results),
        q_goodput=tables.table(results, "q_goodput", ",.0f"),
        over_peft=tables.over_peft(results),
        ttft=tables.table(results, "p99_ttft_ms", ",.0f"),
        training=tables.training(results),
        lull=tables.lull(results),
        **_pacing(found),
        pairs=tables.named(found.pairs, tables.LEARNED),
        jct=" | ".join(f"{k}: {v:.2f}" for k, v in found.completion.items()),
        split=tables.by_load(found.split, tables.LEARNED, " (v2: up to 3x)"),
        adapter_minutes=f"{runs.adapter_seconds(plan) / 60:.3g}",
        adapted=tables.by_load(found.adapted, tables.ADAPTED),
        **_of_parts(found),
        overhead=tables.overhead(results),
        ablations=tables.named(found.ablations, tables.LEARNED),
        cost_requests=f"{found.cost_requests:,}",
    )


def _pacing(found: Found) -> dict[str, str]:
    """What the section on pacing says."""
    ideal = found.ideal
    return {
        "pacing": pacing(found),
        "pacing_fullest": pacing(found, ", fullest"),
        "ideal": tables.ideal(found),
        "ideal_offered": f"{ideal.offered:.2f}",
        "ideal_carried": f"{ideal.carried:.2f}",
    }


def _of_parts(found: Found) -> dict[str, str]:
    """Rows of the tables whose head is in the text."""
    copy = tables.second_copy(found.plan, found.memory)
    return {
        "copy_load": f"{copy['load_seconds']:.1f}",
        "copy_gb": f"{copy['gb']:.0f}",
        "copy_share": f"{copy['share']:.0%}",
        "above": "\n".join(
            f"| {k} | {v['above_one_share']:.1%} |" for k, v in learners(found).items()
        ),
        "fit": "\n".join(
            f"| {k} | {v['samples']} | {v['r2']:.3f} | {v['r2_single']:.3f} |"
            for k, v in found.fit["planes"].items()
            if v
        ),
        "memory": "\n".join(
            f"| {k} | {sum(v.values()):.0f} | {v['base weights']:.0f} | {v['KV']:.0f} |"
            for k, v in found.memory.items()
        ),
        "cost": "\n".join(
            f"| {k} | {v['requests_s']:,.0f} | {v['cpu_s']:.0f} | {v['rss_mb']:.0f} |"
            for k, v in found.cost.items()
        ),
    }
