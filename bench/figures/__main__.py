"""``python -m bench.figures``: simulate, draw, write the page. Can be cut: what is done is kept."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.figures import method, page, plots, runs
from bench.figures.page import Found
from bench.figures.runs import Plan
from bench.figures.store import OutOfTime, Store
from loadgen.trace import parse_argument

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_DONE = 3  # exit status: run the same command again
COST_REQUESTS = 100_000


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def dispersion(values: Sequence[float]) -> float:
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
    p.add_argument("--curve", default="smollm2", help="loss curve of config/curves")
    p.add_argument("--out", type=Path, default=ROOT / "docs" / "evaluation")
    p.add_argument("--store", type=Path, default=ROOT / "data" / "figures", help="results kept")
    p.add_argument(
        "--minutes", type=float, help=f"begin nothing after so long, exit with {NOT_DONE}"
    )
    p.add_argument("--cost-requests", type=int, default=COST_REQUESTS, help="0: no cost figure")
    o = p.parse_args()
    plan = Plan(
        hours=o.hours or (10.0 if o.full else 0.5),
        seeds=tuple(range(o.seeds or (5 if o.full else 1))),
        traces=tuple(parse_argument(t) for t in o.trace),
        curve=o.curve,
    )
    o.out.mkdir(parents=True, exist_ok=True)
    try:
        found = evaluate(plan, Store(o.store, o.minutes, say), o.cost_requests)
    except OutOfTime:
        say("more is to be simulated: run the same command again")
        sys.exit(NOT_DONE)
    draw(found, o.out)
    (o.out / "README.md").write_text(page.write(found), encoding="utf-8")
    (o.out / "results.json").write_text(json.dumps(page.facts(found), indent=1), encoding="utf-8")
    say(f"written: {o.out / 'README.md'}")


def evaluate(plan: Plan, store: Store, cost_requests: int) -> Found:
    """Run everything. Raises OutOfTime."""
    unit = runs.saturation(plan, store) * 1.1 / 4
    served = runs.served(plan, unit, store)
    pairs = runs.pairs(plan, unit, store)
    return Found(
        plan=plan,
        unit=unit,
        results=runs.by_policy(plan, unit, store),
        served=served,
        dispersion=_dispersions(served),
        pairs=pairs,
        completion=runs.completion(pairs),
        split=runs.split(plan, unit, 2, store),
        ablations=runs.ablations(plan, unit, 2, store),
        fit=method.fitted(plan, unit, store),
        memory=method.memory(plan),
        cost=method.cost(store, cost_requests) if cost_requests else {},
        cost_requests=cost_requests,
    )


def _dispersions(served: dict[str, list[list[float]]]) -> dict[str, float]:
    found = {}
    for policy, replicas in served.items():
        each = [dispersion(replica) for replica in replicas if any(replica)]
        found[policy] = statistics.median(each)
        found[f"{policy}, fullest"] = dispersion(max(replicas, key=sum))
    return found


def draw(found: Found, out: Path) -> None:
    """All PNG files."""
    first = [r for r in found.results if r["seed"] == found.plan.seeds[0]]
    ours = {r["load"]: r for r in first if r["policy"] == "collm"}
    robin = {r["load"]: r for r in first if r["policy"] == "round_robin"}
    series = ours[1]["by_time"]
    width = series["bucket_seconds"]
    offered = [v / width for v in series["offered"]]
    minutes = width / 60
    plots.lines(out / "load.png", {"offered at 1x": offered}, minutes, ("minutes", "requests/s"))
    for key, label in (
        ("goodput_tokens_per_s", "goodput, tokens/s"),
        ("q_goodput", "Q-goodput"),
        ("slo_attainment", "SLO attainment"),
        ("p99_ttft_ms", "p99 TTFT, ms"),
    ):
        points = {
            n: {x: page.mean_of(found.results, n, x, key) for x in runs.LOADS}
            for n in runs.policies()
        }
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
    both = {k: max(v, key=sum) for k, v in found.served.items()}
    ideal = statistics.fmean(both["collm"])
    both["ideal mode (one rate)"] = [ideal] * max(map(len, both.values()))
    plots.lines(out / "served.png", both, 1.0, ("seconds", "ended by the fullest a second"))
    quality = {name: page.quality(r) for name, r in page.learners(found).items()}
    plots.curves(out / "quality.png", quality, ("minutes", "mean quality of answers"))
    plots.bars(
        out / "ablations.png",
        {
            "Q-goodput": {k: v["q_goodput"] for k, v in found.ablations.items()},
            "SLO attainment": {k: v["slo_attainment"] for k, v in found.ablations.items()},
        },
    )
    plots.stacked(out / "memory.png", found.memory, "GB a replica (computed)")
    plots.scatter(out / "fit.png", found.fit["points"], ("b", "seconds an iteration", "B"))
    if found.cost:
        speeds = {size: float(r["requests_s"]) for size, r in found.cost.items()}
        plots.cost(out / "cost.png", speeds, ("replicas", "requests a CPU second"))


if __name__ == "__main__":
    main()
