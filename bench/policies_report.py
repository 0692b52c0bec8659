"""What ``bench.policies`` says of its runs: rows, means with their spread, ratios, a figure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import validity

KEYS = {
    "goodput": "active_goodput_tokens_per_s",
    "goodput_to_the_last_answer": "goodput_tokens_per_s",
    "q_goodput": "q_goodput",
    "attainment": "slo_attainment",
    "ttft_p50_ms": "p50_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_p50_ms": "p50_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "e2e_p50_ms": "p50_e2el_ms",
    "e2e_p99_ms": "p99_e2el_ms",
    "completed": "completed",
    "failed": "failed",
    "shed": "shed",
    "client_lag_p99_ms": "client_lag_p99_ms",
    "step_lag_p99": "step_lag_p99",
}
SPREAD = ("goodput", "q_goodput", "attainment", "ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms")
Row = dict[str, Any]
Cell = tuple[str, str, float]  # cluster, trace, load


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the plan."""

    policy: str
    trace: str
    load: float
    seed: int
    shed: bool

    @property
    def label(self) -> str:
        return f"{self.policy}{'+shed' if self.shed else ''}"


def row(cluster: str, run: Run, result: dict[str, Any]) -> Row:
    return {
        "cluster": cluster,
        "policy": run.label,
        "trace": run.trace,
        "load": run.load,
        "seed": run.seed,
        **{key: result.get(source) for key, source in KEYS.items()},
        "void": (result["step_lag_p99"] or 0.0) > validity.VOID_ABOVE,
    }


def ratios(rows: Sequence[Row], key: str = "goodput") -> dict[str, float]:
    """collm's mean goodput over the best baseline's, for each cluster, trace and load.

    Policies that refuse are compared with each other, those that don't likewise.
    """
    out: dict[str, float] = {}
    cells = {(r["cluster"], r["trace"], r["load"]) for r in rows}
    for (cluster, trace, load), shed in itertools.product(sorted(cells), ("", "+shed")):
        mean: dict[str, float] = {}
        for policy in {r["policy"] for r in rows if r["policy"].endswith("+shed") == bool(shed)}:
            goods = [
                r[key]
                for r in rows
                if (r["cluster"], r["trace"], r["load"], r["policy"])
                == (cluster, trace, load, policy)
            ]
            if goods:
                mean[policy] = statistics.mean(goods)
        own = mean.pop(f"collm{shed}", None)
        best = max(mean.values(), default=0.0)
        if own is not None and best > 0:
            out[f"{cluster}/{trace}@{load:g}{shed}"] = round(own / best, 4)
    return out


def spread(rows: Sequence[Row]) -> list[Row]:
    """For each cluster, trace, load and policy: mean, least and largest over its runs."""
    groups: dict[tuple[Cell, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((_cell(r), r["policy"]), []).append(r)
    found = []
    for ((cluster, trace, load), policy), own in groups.items():
        line: Row = {"cluster": cluster, "trace": trace, "load": load, "policy": policy}
        line["runs"] = len(own)
        for key in SPREAD:
            values = [r[key] for r in own if r[key] is not None]
            if values:
                line[key] = [statistics.mean(values), min(values), max(values)]
        found.append(line)
    return found


def _cell(r: Row) -> Cell:
    return r["cluster"], r["trace"], r["load"]


def draw(rows: Sequence[Row], folder: Path) -> list[str]:
    """One picture a cluster: goodput and attainment by policy, bars over all runs' range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    written = []
    lines = spread(rows)
    for cluster in dict.fromkeys(line["cluster"] for line in lines):
        own = [line for line in lines if line["cluster"] == cluster]
        cells = list(dict.fromkeys((line["trace"], line["load"]) for line in own))
        figure, axes = plt.subplots(
            2, len(cells), figsize=(4 * len(cells), 6), squeeze=False, layout="constrained"
        )
        for column, (trace, load) in enumerate(cells):
            here = [line for line in own if (line["trace"], line["load"]) == (trace, load)]
            for axis, key in zip(axes[:, column], ("goodput", "attainment"), strict=True):
                _bars(axis, here, key)
            axes[0, column].set_title(f"{trace}, {load:g}x")
        axes[0, 0].set_ylabel("goodput, tokens/s in time")
        axes[1, 0].set_ylabel("SLO attainment")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"policies-{cluster}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(str(path))
    return written


def _bars(axis: Any, lines: Sequence[Row], key: str) -> None:
    means = [line[key][0] for line in lines]
    reach = [[line[key][0] - line[key][1] for line in lines],
             [line[key][2] - line[key][0] for line in lines]]  # fmt: skip
    colours = ["C1" if line["policy"].startswith("collm") else "C0" for line in lines]
    axis.bar([line["policy"] for line in lines], means, yerr=reach, capsize=3, color=colours)
    axis.tick_params(axis="x", labelrotation=60)
    axis.grid(axis="y", alpha=0.3)
