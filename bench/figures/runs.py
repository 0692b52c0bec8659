"""What is simulated for the evaluation: the paper's cluster, its workload, loads and ablations.

Load scale (docs of the algorithms, section 2): 4x is 1.1 times the load at which round robin
saturates, here: its attainment falls under 90 % of what it reaches unloaded, on the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from bench.figures.store import Result, Store
from services.dispatcher.policies.registry import POLICIES, create
from shared import slo
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario
from sim.workload import AZURE_LIKE, Workload

ORDER = ("collm", "split", "dlora", "shepherd", "peft", "least_loaded", "round_robin")
SLOS = ("code/e2e:500ms", "conv/ttft:1000", "conv/tpot:50")
STATIC = Batching(batching="static")
LOADS = (1, 2, 3, 4)
# (B, b) of every client, down to the smallest micro-batch there is.
PAIRS = ((16, 4), (8, 8), (4, 16), (8, 16), (2, 32), (1, 32), (1, 64))
DIVISIONS = (0.25, 0.5, 0.75)  # of the replicas only train in the isolated design
SPLIT_LOADS = (2, 4)
ADAPTERS = tuple(f"adapter-{k}" for k in range(16))  # the k-th is asked for 1 / k as often
ADAPTER_LOADS = (2, 4)
ADAPTER_SECONDS = 600.0
SATURATION_REQUESTS = 15_000  # without traces; else all of them once
SATURATED, UNLOADED, PRECISION, MOST_PROBES = 0.9, 0.05, 1.05, 20
SERVED_SECONDS = 900.0
SEED = 0  # of everything that is simulated once: all but the policies by load
NEEDED = ("round_robin", "collm")  # the page compares the others with them
ALL = "all"  # stands for every policy of ORDER


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the evaluation."""

    hours: float = 0.5
    seeds: tuple[int, ...] = (0,)
    traces: tuple[Any, ...] = ()  # (tag, path); empty: random streams like the traces
    replicas: int = 16
    profile: str = "h20-8b"
    curve: str = "smollm2"


class Case(NamedTuple):
    """One simulation of the plan, by the name that the page gives it."""

    name: str
    scenario: Scenario
    load: int = 1
    seed: int = SEED


_chosen: list[str] = []


def choose(names: Sequence[str]) -> None:
    """Compare these policies, beside those that are NEEDED; none: all. Raises UnknownPolicy."""
    for name in names:
        if name != ALL:
            create(name)
    _chosen[:] = [*NEEDED, *names] if names else []


def policies() -> list[str]:
    """Those that are compared, ours first; ``split`` has a comparison of its own."""
    known = [name for name in ORDER if name in POLICIES and name != "split"]
    more = [n for n in dict.fromkeys(_chosen) if n not in known and n != ALL]
    if _chosen and ALL not in _chosen:
        known = [n for n in known if n in _chosen]
    return known + more


def workload(plan: Plan, scale: float, seed: int = 0, hours: float | None = None) -> Workload:
    """Both tasks merged, ``scale`` times as fast as recorded."""
    return Workload(
        traces=plan.traces,
        streams=() if plan.traces else AZURE_LIKE,
        repeat=bool(plan.traces),
        duration=(plan.hours if hours is None else hours) * 3600,
        rate_scale=scale,
        slos=slo.parse(SLOS),
        seed=seed,
    )


def scenario(
    plan: Plan, policy: str, scale: float, seed: int = 0, federated: Federated | None = None
) -> Scenario:
    """One run; PEFT serves in static batches, as it does."""
    return Scenario(
        profile=plan.profile,
        replicas=plan.replicas,
        policy=policy,
        workload=workload(plan, scale, seed),
        batching=STATIC if policy == "peft" else Batching(),
        federated=federated,
        curve=plan.curve,
        seed=seed,
    )


def saturation(plan: Plan, store: Store) -> float:
    """Scale of the recorded rate at which round robin saturates: doubling, then halving."""

    tried: list[float] = []

    def attainment(scale: float) -> float:
        tried.append(scale)
        one = scenario(plan, "round_robin", scale)
        work = msgspec.structs.replace(
            one.workload,
            duration=None,
            repeat=False,
            limit=None if plan.traces else SATURATION_REQUESTS,
        )
        found = float(store.run(msgspec.structs.replace(one, workload=work))["slo_attainment"])
        store.say(f"probe {len(tried)}, round robin at {scale:.3g}: attainment {found:.3f}")
        return found

    needed = SATURATED * attainment(UNLOADED)
    low, high = UNLOADED, 0.5
    for _ in range(MOST_PROBES):
        if attainment(high) < needed:
            break
        low, high = high, 2 * high
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attainment(middle) >= needed else (low, middle)
    return high


def by_policy(plan: Plan, unit: float) -> list[Case]:
    """Every policy at every load and seed; ours trains when it can, the others never do."""
    found = []
    for seed in plan.seeds:
        for load in LOADS:
            for policy in policies():
                federated = Federated() if policy == "collm" else None
                one = scenario(plan, policy, unit * load, seed, federated)
                found.append(Case(policy, one, load, seed))
    return found


ABLATIONS: dict[str, Federated] = {
    "all parts": Federated(),
    "no yielding": Federated(yielding=False),
    "no consolidation": Federated(),
    "idle rule without guard": Federated(
        launcher=msgspec.structs.replace(Federated().launcher, rule="paper")
    ),
    "solo instead of federated": Federated(solo=True),
    "B = 0 (no training)": Federated(training_off=True),
}


def ablations(plan: Plan, unit: float, load: int = 2) -> list[Case]:
    """Each part off in turn."""
    found = []
    for name, federated in ABLATIONS.items():
        one = scenario(plan, "collm", unit * load, SEED, federated)
        if name == "no consolidation":
            one = msgspec.structs.replace(one, policy_options={"consolidate": False})
        found.append(Case(name, one, load))
    return found


def split(plan: Plan, unit: float) -> list[Case]:
    """The isolated design at several divisions of the same hardware, and ours, by load."""
    found = []
    for load in SPLIT_LOADS:
        ours = scenario(plan, "collm", unit * load, SEED, Federated())
        found.append(Case("collm (shared)", ours, load))
        for share in DIVISIONS:
            dedicated = max(1, round(plan.replicas * share))
            apart = Federated(dedicated=dedicated, publish_at_end=True)
            one = scenario(plan, "split", unit * load, SEED, apart)
            serving = plan.replicas - dedicated
            one = msgspec.structs.replace(one, policy_options={"serving": serving})
            found.append(Case(f"split: {serving} serve, {dedicated} train", one, load))
    return found


# Name -> policy, batching. dLoRA's replicas merge an adapter where that pays.
ADAPTED = {
    "collm": ("collm", Batching()),
    "dlora": ("dlora", Batching()),
    "dlora, merging": ("dlora", Batching(lora="dynamic")),
    "least_loaded": ("least_loaded", Batching()),
    "round_robin": ("round_robin", Batching()),
}


def adapter_seconds(plan: Plan) -> float:
    """How long requests that name adapters come."""
    return min(ADAPTER_SECONDS, 3600 * plan.hours)


def adapted(plan: Plan, unit: float) -> list[Case]:
    """Some minutes in which each request names one of sixteen adapters and nothing trains."""
    found = []
    for load in ADAPTER_LOADS:
        for name, (policy, batching) in ADAPTED.items():
            one = scenario(plan, policy, unit * load)
            work = msgspec.structs.replace(
                one.workload,
                duration=adapter_seconds(plan),
                adapters=ADAPTERS,
                adapter_assignment="zipf",
                zipf_exponent=1.0,
            )
            one = msgspec.structs.replace(one, workload=work, batching=batching)
            found.append(Case(name, one, load))
    return found


def pairs(plan: Plan, unit: float) -> list[Case]:
    """Fixed (B, b) of every client against the coordinator's search."""
    choices = {"coordinator": Federated()}
    choices |= {f"({B}, {b})": Federated(fixed=(B, b)) for B, b in PAIRS}
    return [
        Case(name, scenario(plan, "collm", unit, SEED, federated))
        for name, federated in choices.items()
    ]


def served(plan: Plan, unit: float, load: int = 2) -> list[Case]:
    """A quarter of an hour in which nothing trains, to count what each replica ends a second."""
    found = []
    for policy in NEEDED:
        one = scenario(plan, policy, unit * load)
        work = msgspec.structs.replace(one.workload, duration=SERVED_SECONDS)
        found.append(Case(policy, msgspec.structs.replace(one, workload=work), load))
    return found


def every(plan: Plan, unit: float) -> list[Scenario]:
    """All of the above."""
    cases = [*served(plan, unit), *pairs(plan, unit), *by_policy(plan, unit)]
    cases += [*split(plan, unit), *ablations(plan, unit), *adapted(plan, unit)]
    return [case.scenario for case in cases]


def simulated(cases: Sequence[Case], store: Store) -> dict[str, Result]:
    """Results by name. Raises OutOfTime."""
    return {case.name: _one(case, store) for case in cases}


def by_load(cases: Sequence[Case], store: Store) -> dict[int, dict[str, Result]]:
    """Results by load, then by name. Raises OutOfTime."""
    found: dict[int, dict[str, Result]] = {}
    for case in cases:
        found.setdefault(case.load, {})[case.name] = _one(case, store)
    return found


def rows(cases: Sequence[Case], store: Store) -> list[Result]:
    """Results with load and seed. Raises OutOfTime."""
    return [{"load": case.load, "seed": case.seed, **_one(case, store)} for case in cases]


def _one(case: Case, store: Store) -> Result:
    result = store.run(case.scenario)
    training = result.get("training")
    store.say(
        f"{case.name} at {case.load}x, seed {case.seed}: "
        f"goodput {result['goodput_tokens_per_s']:.0f} tok/s, Q {result['q_goodput']:.0f}, "
        f"attainment {result['slo_attainment']:.3f}"
        + (f", {training['rounds']} rounds" if training else "")
    )
    return result
