"""What results.json holds beside the page's tables: its origin, and each part with its seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bench.figures import runs, tables
from bench.figures.found import Found, Result, learners, ratio_to
from bench.figures.reckoned import fluid_bound

LONG = ("by_time", "scenario", "tags")  # left out of the parts


def facts(found: Found, made: Mapping[str, str | None]) -> dict[str, Any]:
    """As plain JSON. ``made``: of ``bench.origin``."""
    plan = found.plan
    traces = {str(tag): path.name for tag, path in plan.traces}
    once = ("pairs", "split", "adapters", "ablations", "above_one", "served_dispersion", "fit")
    return {
        **made,
        "plan": {
            "hours": plan.hours,
            "traces": traces or "random streams with the traces' statistics",
            "replicas": plan.replicas,
            "profile": plan.profile,
            "curve": plan.curve,
            "policies": runs.policies(),
            "cost_requests": found.cost_requests,
        },
        "seeds": {"rows": list(plan.seeds), **{part: [runs.SEED] for part in once}},
        "unit_scale": found.unit,
        **_reckoned(found),
        "pairs": bare(found.pairs),
        "split": {f"{load}x": bare(at) for load, at in found.split.items()},
        "adapters": {f"{load}x": bare(at, "tags") for load, at in found.adapted.items()},
        "ablations": bare(found.ablations),
        "rows": list(bare({str(k): r for k, r in enumerate(found.results)}, "tags").values()),
    }


def _reckoned(found: Found) -> dict[str, Any]:
    """What the page shows that no single simulation says."""
    ours = [r for r in found.results if r["policy"] == "collm" and r["seed"] == found.plan.seeds[0]]
    return {
        "served_dispersion": found.dispersion,
        "ideal": msgspec.to_builtins(found.ideal),
        "completion": found.completion,
        "fluid_bound": {f"{r['load']}x": fluid_bound(found.plan, r) for r in ours},
        "utilisation_in_a_lull": tables.lulls(found.results),
        "q_goodput_over_peft_on_conversation": {
            f"{load}x": ratio_to(found.results, "peft", load, "q_goodput", "conv")
            for load in runs.LOADS
        },
        "goodput_over_split": {
            f"{load}x": {name: tables.over_first(at, name) for name in at}
            for load, at in found.split.items()
        },
        "above_one": {k: v["above_one_share"] for k, v in learners(found).items()},
        "second_copy": tables.second_copy(found.plan, found.memory),
        "fit": found.fit["planes"],
        "memory_gb": found.memory,
        "cost": found.cost,
    }


def bare(results: Mapping[str, Result], *kept: str) -> dict[str, dict[str, Any]]:
    """Results without what is LONG, unless it is ``kept``."""
    return {
        name: {
            key: _without_history(value) if key == "training" else value
            for key, value in result.items()
            if key not in LONG or key in kept
        }
        for name, result in results.items()
    }


def _without_history(training: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in training.items() if k != "cross_entropy"}


def text(made: Mapping[str, str | None]) -> str:
    """The last section of the page."""
    commit = f" at commit {made['commit']}" if made["commit"] else ""
    return f"""
## How this was made
`{made["command"]}`{commit}, {made["date"]}, on {made["machine"]}. Simulations that were kept from
earlier runs of the same code are not made again; the JSON beside this page says of each when it was
made, and on what machine its processor time was measured.
"""
