"""The policies by loads alone, over a long span: ``python -m bench.figures.long --data FOLDER``.

All parts of the evaluation over ten hours take hours; this is its first table and what training
costs there: every policy at 1x to 4x with one seed, and ``collm`` with B = 0. Takes the options of
``bench.figures`` and can be cut as that can. Writes ``long.md`` and ``long.json`` into ``--out``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from bench import origin
from bench.figures import parallel, record, runs, tables
from bench.figures.__main__ import opened, options, resumable, say
from bench.figures.found import Result
from bench.figures.runs import LOADS, SEED, Case, Plan
from sim.rounds import Federated

HOURS = 10.0
NO_TRAINING = "collm, B = 0"


def cases(plan: Plan, unit: float) -> list[Case]:
    """``unit``: rate scale of 1x."""
    off = Federated(training_off=True)
    return [
        *runs.by_policy(plan, unit),
        *(
            Case(NO_TRAINING, runs.scenario(plan, "collm", unit * load, SEED, off), load)
            for load in LOADS
        ),
    ]


def table(names: Sequence[str], results: Mapping[tuple[str, int], Result]) -> str:
    """Goodput (attainment), Q-goodput, by policy and load."""
    head = " | ".join(f"{load}x | Q" for load in LOADS)
    lines = [f"| policy | {head} |", "|---" * (2 * len(LOADS) + 1) + "|"]
    for name in names:
        cells = []
        for load in LOADS:
            one = results[name, load]
            cells.append(f"{one[tables.GOODPUT]:,.0f} ({one['slo_attainment']:.3f})")
            cells.append(f"{one['q_goodput']:,.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(plan: Plan, names: Sequence[str], results: Mapping[tuple[str, int], Result]) -> str:
    offered = [int(results["collm", load]["offered"]) for load in (LOADS[0], LOADS[-1])]
    return f"""# The policies over {plan.hours:g} hours

Simulated as [the evaluation](README.md) is, whose words and cautions hold here: the traces
repeated, {offered[0]:,} requests at {LOADS[0]}x to {offered[1]:,} at {LOADS[-1]}x, one seed.
Goodput in tokens/s, attainment in brackets, then Q-goodput (extrapolated: a real model would level
off earlier).

{table(names, results)}
"""


def main() -> None:
    o = options()
    made = origin.facts()
    plan = Plan(hours=o.hours or HOURS, seeds=(SEED,), traces=o.traces, curve=o.curve)
    with resumable("bench.figures.long"):
        store = opened(o)
        unit = runs.saturation(plan, store) * 1.1 / 4
        planned = cases(plan, unit)
        scenarios = [case.scenario for case in planned]
        store.expect(scenarios)
        parallel.ahead(store, scenarios, o.jobs)
        results = {(case.name, case.load): store.run(case.scenario) for case in planned}
    names = [*runs.policies(), NO_TRAINING]
    (o.out / "long.md").write_text(page(plan, names, results) + record.text(made), encoding="utf-8")
    named: dict[str, Result] = {f"{name}, {load}x": r for (name, load), r in results.items()}
    rows = record.bare(named, "tags")
    facts = {**made, "hours": plan.hours, "unit_scale": unit, "results": rows}
    (o.out / "long.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    say(f"written: {o.out / 'long.md'}")


if __name__ == "__main__":
    main()
