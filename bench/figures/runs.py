"""What is simulated for the evaluation: the paper's cluster, its workload, loads and ablations.

Load scale (docs of the algorithms, section 2): 4x is 1.1 times the load at which round robin
saturates, here: its attainment falls under 90 % of what it reaches unloaded, on the same requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bench.figures.store import Result, Store
from services.dispatcher.policies.registry import POLICIES
from shared import profile, slo
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario
from sim.workload import AZURE_LIKE, Workload

ORDER = ("collm", "split", "dlora", "shepherd", "peft", "least_loaded", "round_robin")
SLOS = ("code/e2e:500ms", "conv/ttft:1000", "conv/tpot:50")
STATIC = Batching(batching="static")
LOADS = (1, 2, 3, 4)
PAIRS = ((16, 4), (8, 8), (4, 16), (8, 16), (2, 32))  # (B, b) of every client
SATURATION_REQUESTS = 15_000  # without traces; else all of them once
SATURATED, UNLOADED, PRECISION, MOST_PROBES = 0.9, 0.05, 1.05, 20
SERVED_SECONDS = 900.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the evaluation."""

    hours: float = 0.5
    seeds: tuple[int, ...] = (0,)
    traces: tuple[Any, ...] = ()  # (tag, path); empty: random streams like the traces
    replicas: int = 16
    profile: str = "h20-8b"
    curve: str = "smollm2"


def policies() -> list[str]:
    """Those that are there, ours first; ``split`` has a comparison of its own."""
    return [name for name in ORDER if name in POLICIES and name != "split"]


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

    def attainment(scale: float) -> float:
        one = scenario(plan, "round_robin", scale)
        work = msgspec.structs.replace(
            one.workload,
            duration=None,
            repeat=False,
            limit=None if plan.traces else SATURATION_REQUESTS,
        )
        found = float(store.run(msgspec.structs.replace(one, workload=work))["slo_attainment"])
        store.say(f"round robin at {scale:.3g}: attainment {found:.3f}")
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


def by_policy(plan: Plan, unit: float, store: Store) -> list[Result]:
    """Every policy at every load and seed; ours trains when it can, the others never do."""
    found = []
    for seed in plan.seeds:
        for load in LOADS:
            for policy in policies():
                federated = Federated() if policy == "collm" else None
                result = store.run(scenario(plan, policy, unit * load, seed, federated))
                store.say(
                    f"{policy} at {load}x: goodput {result['goodput_tokens_per_s']:.0f} tok/s, "
                    f"Q {result['q_goodput']:.0f}, attainment {result['slo_attainment']:.3f}"
                )
                found.append({"load": load, "seed": seed, **result})
    return found


ABLATIONS: dict[str, Federated] = {
    "all parts": Federated(),
    "no yielding": Federated(yielding=False),
    "no consolidation": Federated(),
    "idle rule without guard": Federated(
        launcher=msgspec.structs.replace(Federated().launcher, rule="paper")
    ),
    "no quality-aware order": Federated(quality_order=False),
    "solo instead of federated": Federated(solo=True),
    "B = 0 (no training)": Federated(training_off=True),
}


def ablations(plan: Plan, unit: float, load: float, store: Store) -> dict[str, Result]:
    """Each part off in turn."""
    found = {}
    for name, federated in ABLATIONS.items():
        one = scenario(plan, "collm", unit * load, 0, federated)
        if name == "no consolidation":
            one = msgspec.structs.replace(one, policy_options={"consolidate": False})
        found[name] = store.run(one)
        store.say(f"{name}: Q-goodput {found[name]['q_goodput']:.0f}")
    return found


def split(plan: Plan, unit: float, load: float, store: Store) -> dict[str, Result]:
    """The isolated design at several divisions of the same hardware, and ours."""
    found = {"collm (shared)": store.run(scenario(plan, "collm", unit * load, 0, Federated()))}
    for share in (0.25, 0.5, 0.75):
        dedicated = max(1, round(plan.replicas * share))
        one = scenario(
            plan, "split", unit * load, 0, Federated(dedicated=dedicated, publish_at_end=True)
        )
        serving = plan.replicas - dedicated
        result = store.run(msgspec.structs.replace(one, policy_options={"serving": serving}))
        found[f"split: {serving} serve, {dedicated} train"] = result
        store.say(f"split {serving}+{dedicated}: Q-goodput {result['q_goodput']:.0f}")
    return found


def pairs(plan: Plan, unit: float, store: Store) -> dict[str, Result]:
    """Fixed (B, b) of every client against the coordinator's search."""
    choices: dict[str, Federated] = {"coordinator": Federated()}
    for B, b in PAIRS:
        choices[f"({B}, {b})"] = Federated(fixed=(B, b))
    found = {}
    for name, federated in choices.items():
        found[name] = store.run(scenario(plan, "collm", unit, 0, federated))
        store.say(f"{name}: {found[name]['training']['rounds']} rounds")
    return found


def completion(pairs: dict[str, Result]) -> dict[str, float]:
    """Time to the cross-entropy that every pair reaches, over the coordinator's time."""
    histories = {name: r["training"]["cross_entropy"] for name, r in pairs.items()}
    target = max(history[-1][1] for history in histories.values())
    times = {
        name: next(t for t, ce in history if ce <= target) for name, history in histories.items()
    }
    own = times["coordinator"]
    return {name: t / own if own > 0 else 1.0 for name, t in times.items()}


def served(plan: Plan, unit: float, store: Store) -> dict[str, list[list[float]]]:
    """Requests that each replica ended in each second, by policy, at 2x; nothing trains."""
    found = {}
    for policy in ("round_robin", "collm"):
        one = scenario(plan, policy, unit * 2)
        work = msgspec.structs.replace(one.workload, duration=SERVED_SECONDS)
        result = store.run(msgspec.structs.replace(one, workload=work))
        found[policy] = result["by_time"]["served"]
    return found


def fluid_bound(plan: Plan, result: Result) -> float:
    """min(offered, what all replicas could carry) in tokens/s; no policy can pass it."""
    hardware = profile.load(plan.profile)
    done = max(1, result["completed"])
    prompt = result["total_input_tokens"] / done
    output = result["total_output_tokens"] / done
    model = hardware.coefficients
    best = max(output * model.rate(b, 0, prompt, output) for b in range(1, hardware.b_max + 1))
    offered = result["total_output_tokens"] / done * result["offered"] / result["duration"]
    return float(min(offered, best * plan.replicas))
