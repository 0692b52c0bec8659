"""What results.json holds beside the page's tables: its origin, and each part with its seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.figures import page, runs
from bench.figures.page import Found, Result

LONG = ("by_time", "scenario", "tags")  # left out of the parts


def facts(found: Found, made: Mapping[str, str | None]) -> dict[str, Any]:
    """As plain JSON. ``made``: of ``bench.origin``."""
    plan = found.plan
    traces = {str(tag): str(path) for tag, path in plan.traces}
    once = ("pairs", "split", "ablations", "above_one", "served_dispersion", "fit")
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
        "pairs": bare(found.pairs),
        "split": bare(found.split),
        "ablations": bare(found.ablations),
        "above_one": {k: v["above_one_share"] for k, v in page.learners(found).items()},
    }


def bare(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """Results without their series."""
    return {
        name: {
            key: _without_history(value) if key == "training" else value
            for key, value in result.items()
            if key not in LONG
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
earlier runs of the same code are not made again; `results.json` says of each when it was made, and
on what machine its processor time was measured.
"""
