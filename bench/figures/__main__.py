"""``python -m bench.figures``: simulate, draw, write the page."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.figures import page, plots, runs
from bench.figures.page import Result
from bench.figures.runs import Plan
from loadgen.trace import parse_argument

ROOT = Path(__file__).resolve().parent.parent.parent


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def dispersion(values: list[float]) -> float:
    """Variance over the squared mean: replicas that serve more are not called burstier for it."""
    mean = statistics.fmean(values) if values else 0.0
    return statistics.pvariance(values) / mean**2 if mean else 0.0


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    p.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="TAG=CSV",
        help="tags code and conv; without: random streams with their statistics",
    )
    p.add_argument("--hours", type=float, help="of arrivals (default 0.5; --full: 10)")
    p.add_argument("--seeds", type=int, help="default 1; --full: 5")
    p.add_argument("--full", action="store_true", help="ten hours, five seeds")
    p.add_argument("--out", type=Path, default=ROOT / "docs" / "evaluation")
    o = p.parse_args()
    plan = Plan(
        hours=o.hours or (10.0 if o.full else 0.5),
        seeds=tuple(range(o.seeds or (5 if o.full else 1))),
        traces=tuple(parse_argument(t) for t in o.trace),
    )
    o.out.mkdir(parents=True, exist_ok=True)
    (o.out / "README.md").write_text(evaluate(plan, o.out), encoding="utf-8")
    say(f"written: {o.out / 'README.md'}")


def evaluate(plan: Plan, out: Path) -> str:
    """Run everything, draw it into ``out``; the page's text."""
    unit = runs.saturation(plan, say) * 1.1 / 4
    results = runs.by_policy(plan, unit, say)
    names = runs.policies()
    first = [r for r in results if r["seed"] == plan.seeds[0]]
    ours = {r["load"]: r for r in first if r["policy"] == "collm"}
    robin = {r["load"]: r for r in first if r["policy"] == "round_robin"}
    series = ours[1]["by_time"]
    per_second = [v / series["bucket_seconds"] for v in series["offered"]]
    plots.lines(
        out / "load.png",
        {"offered at 1x": per_second},
        series["bucket_seconds"] / 60,
        ("minutes", "requests/s"),
    )
    for key, label in (
        ("goodput_tokens_per_s", "goodput, tokens/s"),
        ("q_goodput", "Q-goodput"),
        ("slo_attainment", "SLO attainment"),
        ("p99_ttft_ms", "p99 TTFT, ms"),
    ):
        points = {n: {x: page.mean_of(results, n, x, key) for x in runs.LOADS} for n in names}
        plots.by_load(out / f"{key}.png", points, label)
    plots.heat(
        out / "utilisation.png",
        {
            "collm, serving, 1x": series["utilisation"],
            "collm, training, 1x": series["training"],
            "round robin, 1x": robin[1]["by_time"]["utilisation"],
        },
        series["utilisation_bucket_seconds"],
    )
    served = runs.served(plan, unit)
    plots.lines(out / "served.png", served, 1.0, ("seconds", "ended by replica 0 a second"))
    pairs = runs.pairs(plan, unit, say)
    split = runs.split(plan, unit, 2, say)
    ablations = runs.ablations(plan, unit, 2, say)
    plots.bars(
        out / "ablations.png",
        {
            "Q-goodput": {k: v["q_goodput"] for k, v in ablations.items()},
            "SLO attainment": {k: v["slo_attainment"] for k, v in ablations.items()},
        },
    )
    spread = {k: dispersion(v) for k, v in served.items()}
    facts = {
        "unit_scale": unit,
        "served_dispersion": spread,
        "rows": [{k: v for k, v in r.items() if k not in ("by_time", "scenario")} for r in results],
    }
    (out / "results.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    ratio = spread["collm"] / max(1e-9, spread["round_robin"])
    return _page(plan, unit, results, names, ratio, pairs, split, ablations)


def _page(
    plan: Plan,
    unit: float,
    results: Sequence[Result],
    names: Sequence[str],
    ratio: float,
    pairs: Mapping[str, Result],
    split: Mapping[str, Result],
    ablations: Mapping[str, Result],
) -> str:
    source = "the given traces" if plan.traces else "random streams with the traces' statistics"
    learned = {
        "Q-goodput": "q_goodput",
        "attainment": "slo_attainment",
        "rounds": "training.rounds",
        "samples/s": "training.samples_per_s",
        "share training": "training.compute_share",
    }
    return f"""# Evaluation by simulation

Written by `make figures` on {datetime.now(UTC):%Y-%m-%d}. Everything on this page is simulated on
virtual time with the dispatcher's own policies: {plan.replicas} replicas with profile
`{plan.profile}` (derived from published figures, not measured), {plan.hours:g} hours of {source},
{len(plan.seeds)} seed(s). 1x = {unit:.2f} times the recorded rate; 4x is 1.1 times what round robin
sustains. SLO: code 0.5 s end to end; conversation 1 s to the first token and 50 ms a token.
Quality comes from the loss curve `{plan.curve}` (see `config/curves`); the baselines serve the
initial adapter and never train. How far a simulation can be trusted is measured by
`python -m bench.sim` (docs/performance.md).

## Load (paper: Fig. 1)
![Requests a second](load.png)

## Goodput by policy (Fig. 10)
![Goodput](goodput_tokens_per_s.png)

{page.table(results, names, "goodput_tokens_per_s", ",.0f")}

Attainment:

{page.table(results, names, "slo_attainment", ".3f")}

![Attainment](slo_attainment.png)

Ours over each baseline at 4x, by task; a ratio below 1 is a miss:

{page.ratios(results, names, 4)}

Against the fluid bound min(offered, what all replicas could carry):

{page.bounds(plan, results)}

## Q-goodput by policy (Fig. 10)
![Q-goodput](q_goodput.png)

{page.table(results, names, "q_goodput", ",.0f")}

## Time to first token (Fig. 4)
![p99 TTFT](p99_ttft_ms.png)

{page.table(results, names, "p99_ttft_ms", ",.0f")}

The policy `collm` lets hopeless requests wait behind all others (best effort), so its p99 over all
requests under overload is the waiting of those it gave up, not of those it served in time.

## Utilisation and training (Fig. 11)
![Utilisation](utilisation.png)

{page.training(results)}

The paper reports about 30 % of compute training at 1x and none at 4x on the conversation trace.

## Pacing (Fig. 5 and 13)
![Served a second](served.png)

Relative variance (variance / mean²) of requests ended a second on one replica at 2x, collm /
round robin: {ratio:.2f} (aim: at most 1/3).

## Batch pairs against the coordinator (Fig. 12b)
{page.named(pairs, learned)}

## Shared replicas against the isolated design at 2x (Fig. 2; v2 reports up to 3x goodput)
{page.named(split, learned)}

The isolated design serves the version of a session only when that session has ended.

## Ablations at 2x
![Ablations](ablations.png)

{page.named(ablations, learned)}
"""


if __name__ == "__main__":
    main()
