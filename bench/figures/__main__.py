"""``python -m bench.figures``: simulate, draw, write the page. Can be cut: what is done is kept.

Without ``--data`` requests are random, with the traces' statistics; without ``--full`` it is half
an hour with one seed. Only ``collm`` trains; the other policies serve the initial adapter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import azure, origin, pacing
from bench.figures import found as of
from bench.figures import method, page, parallel, plots, reckoned, record, runs
from bench.figures.found import Found
from bench.figures.runs import Plan
from bench.figures.store import OutOfTime, Store
from loadgen.trace import TraceError, parse_argument
from services.dispatcher.policies.registry import UnknownPolicy
from sim.scenario import ScenarioError

OUT = origin.ROOT / "data" / "figures"  # not docs: what is published there took hours
NOT_DONE = 3  # exit status: run the same command again
INTERRUPTED = 130  # exit status after Ctrl-C, as of a shell
COST_REQUESTS = 100_000


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    add = p.add_argument
    add("--data", type=Path, metavar="FOLDER", help=azure.SOURCE)
    add("--trace", action="append", default=[], metavar="TAG=CSV", help="code=… and conv=… instead")
    add("--hours", type=float, help="of arrivals (default 0.5; --full: 10)")
    add("--seeds", type=int, help="default 1; --full: 5")
    add("--full", action="store_true", help="ten hours, five seeds")
    add(
        "--policies",
        nargs="+",
        default=[],
        metavar="NAME",
        help="compare these, and module:Class of your own, with collm and round_robin; "
        "`all` stands for every policy there is (default)",
    )
    add("--curve", default="smollm2", help="loss curve of config/curves")
    add("--out", type=Path, default=OUT, help="for page, figures and results.json (%(default)s)")
    add("--store", type=Path, default=OUT / "kept", help="results kept (%(default)s)")
    add("--minutes", type=float, help=f"begin nothing after so long, exit with {NOT_DONE}")
    add("--jobs", type=int, default=1, help="simulations at once, a core each (%(default)s)")
    add("--cost-requests", type=int, default=COST_REQUESTS, help="0: no cost figure")
    o = p.parse_args(arguments)
    try:
        if o.data is not None:
            o.trace = [f"{tag}={path}" for tag, path in azure.traces(o.data).items()]
        o.traces = tuple(parse_argument(t) for t in o.trace)
        runs.choose(o.policies)
    except (azure.NoTraces, UnknownPolicy) as e:
        p.error(str(e))
    for name in ("jobs", "seeds"):
        if (given := getattr(o, name)) is not None and given < 1:
            p.error(f"--{name}: at least 1 expected, not {given}")
    if o.hours is not None and not 0 < o.hours < math.inf:
        p.error(f"--hours: a finite number above 0 expected, not {o.hours:g}")
    if o.traces and sorted(tag for tag, _ in o.traces) != sorted(azure.TAGS):
        p.error(f"--trace: one CSV each with the tags {' and '.join(azure.TAGS)} is expected")
    return o


def opened(o: argparse.Namespace) -> Store:
    """What is kept, and the folder for what will be written. Raises OSError."""
    o.out.mkdir(parents=True, exist_ok=True)
    o.store.mkdir(parents=True, exist_ok=True)
    return Store(o.store, o.minutes, say)


@contextlib.contextmanager
def resumable(name: str) -> Iterator[None]:
    """Simulations that may be cut or refused: ends the command ``name`` with what to do."""
    try:
        yield
    except OutOfTime:
        say("more is to be simulated: run the same command again")
        sys.exit(NOT_DONE)
    except KeyboardInterrupt:
        say("cut; what is done is kept: run the same command again")
        sys.exit(INTERRUPTED)
    except (TraceError, ScenarioError, OSError) as e:
        sys.exit(f"{name}: {e}")


def main() -> None:
    o = options()
    made = origin.facts()
    plan = Plan(
        hours=o.hours or (10.0 if o.full else 0.5),
        seeds=tuple(range(o.seeds or (5 if o.full else 1))),
        traces=o.traces,
        curve=o.curve,
    )
    with resumable("bench.figures"):
        found = evaluate(plan, opened(o), o.cost_requests, o.jobs)
    draw(found, o.out)
    (o.out / "README.md").write_text(page.write(found) + record.text(made), encoding="utf-8")
    facts = json.dumps(record.facts(found, made), indent=1)
    (o.out / "results.json").write_text(facts, encoding="utf-8")
    say(f"written: {o.out / 'README.md'}")


def evaluate(plan: Plan, store: Store, cost_requests: int, jobs: int = 1) -> Found:
    """Run everything. Raises OutOfTime."""
    unit = runs.saturation(plan, store) * 1.1 / 4
    every = runs.every(plan, unit)
    store.expect(every)
    parallel.ahead(store, every, jobs)
    paced = runs.simulated(runs.served(plan, unit), store)
    served = {name: result["by_time"]["served"] for name, result in paced.items()}
    pairs = runs.simulated(runs.pairs(plan, unit), store)
    return Found(
        plan=plan,
        unit=unit,
        results=runs.rows(runs.by_policy(plan, unit), store),
        served=served,
        dispersion=_dispersions(served),
        ideal=reckoned.ideal(plan, paced["round_robin"]),
        pairs=pairs,
        completion=reckoned.completion(pairs),
        split=runs.by_load(runs.split(plan, unit), store),
        adapted=runs.by_load(runs.adapted(plan, unit), store),
        ablations=runs.simulated(runs.ablations(plan, unit), store),
        fit=method.fitted(plan, unit, store),
        memory=method.memory(plan),
        cost=method.cost(store, cost_requests) if cost_requests else {},
        cost_requests=cost_requests,
    )


def _dispersions(served: dict[str, list[list[float]]]) -> dict[str, float | None]:
    """By policy: the median over its replicas, and that of the fullest."""
    found = {policy: pacing.dispersion(replicas) for policy, replicas in served.items()}
    return found | {f"{k}, fullest": pacing.fullest(v) for k, v in served.items()}


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
            n: {x: of.mean_of(found.results, n, x, key) for x in runs.LOADS}
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
    plots.lines(
        out / "served.png", of.fullest(found), 1.0, ("seconds", "ended by the fullest a second")
    )
    quality = {name: of.quality(r) for name, r in of.learners(found).items()}
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
