"""What is simulated for the evaluation: the paper's cluster, its workload, loads and ablations.

Load scale (docs of the algorithms, section 2): 4x is 1.1 times the load at which round robin
saturates, here: its attainment falls under 90 % of what it reaches unloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from services.dispatcher.policies.registry import POLICIES
from shared import slo
from sim import what_if
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario, run
from sim.workload import AZURE_LIKE, Workload

Say = Callable[[str], None]
Result = dict[str, Any]

ORDER = ("collm", "split", "dlora", "shepherd", "peft", "least_loaded", "round_robin")
SLOS = ("code/e2e:500ms", "conv/ttft:1000", "conv/tpot:50")
STATIC = Batching(batching="static")
LOADS = (1, 2, 3, 4)
PAIRS = ((16, 4), (8, 8), (4, 16), (8, 16), (2, 32))  # (B, b) of every client
SATURATION_REQUESTS = 8_000
SERVED_SECONDS = 900.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the evaluation."""

    hours: float = 0.5
    seeds: tuple[int, ...] = (0,)
    traces: tuple[Any, ...] = ()  # (tag, path); empty: random streams like the traces
    replicas: int = 16
    profile: str = "h20-8b"
    curve: str = "assumed"


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


def saturation(plan: Plan, say: Say) -> float:
    """Scale of the recorded rate at which round robin saturates."""
    one = scenario(plan, "round_robin", 1.0)
    work = msgspec.structs.replace(one.workload, limit=SATURATION_REQUESTS)
    found = what_if.answer(msgspec.structs.replace(one, workload=work), say=say)
    return float(found["largest_scale"])


def by_policy(plan: Plan, unit: float, say: Say) -> list[Result]:
    """Every policy at every load and seed; ours trains when it can, the others never do."""
    found = []
    for load in LOADS:
        for seed in plan.seeds:
            for policy in policies():
                federated = Federated() if policy == "collm" else None
                result = run(scenario(plan, policy, unit * load, seed, federated))
                say(
                    f"{policy} at {load}x: goodput {result['goodput_tokens_per_s']:.0f} tok/s, "
                    f"Q {result['q_goodput']:.0f}, attainment {result['slo_attainment']:.3f}"
                )
                found.append({"load": load, "seed": seed, **result})
    return found


ABLATIONS: dict[str, Federated | None] = {
    "all parts": Federated(),
    "no yielding": Federated(yielding=False),
    "idle rule without guard": Federated(
        launcher=msgspec.structs.replace(Federated().launcher, rule="paper")
    ),
    "no quality-aware order": Federated(quality_order=False),
    "solo instead of federated": Federated(solo=True),
    "B = 0 (no training)": Federated(training_off=True),
}


def ablations(plan: Plan, unit: float, load: float, say: Say) -> dict[str, Result]:
    """Each part off in turn."""
    found = {}
    for name, federated in ABLATIONS.items():
        found[name] = run(scenario(plan, "collm", unit * load, 0, federated))
        say(f"{name}: Q-goodput {found[name]['q_goodput']:.0f}")
    return found


def split(plan: Plan, unit: float, load: float, say: Say) -> dict[str, Result]:
    """The isolated design at several divisions of the same hardware, and ours."""
    found = {"collm (shared)": run(scenario(plan, "collm", unit * load, 0, Federated()))}
    for share in (0.25, 0.5, 0.75):
        dedicated = max(1, round(plan.replicas * share))
        one = scenario(
            plan, "split", unit * load, 0, Federated(dedicated=dedicated, publish_at_end=True)
        )
        serving = plan.replicas - dedicated
        result = run(msgspec.structs.replace(one, policy_options={"serving": serving}))
        found[f"split: {serving} serve, {dedicated} train"] = result
        say(f"split {serving}+{dedicated}: Q-goodput {result['q_goodput']:.0f}")
    return found


def pairs(plan: Plan, unit: float, say: Say) -> dict[str, Result]:
    """Fixed (B, b) of every client against the coordinator's search."""
    choices: dict[str, Federated] = {"coordinator": Federated()}
    for B, b in PAIRS:
        choices[f"({B}, {b})"] = Federated(fixed=(B, b))
    found = {}
    for name, federated in choices.items():
        found[name] = run(scenario(plan, "collm", unit, 0, federated))
        say(f"{name}: {found[name]['training']['rounds']} rounds")
    return found


def served(plan: Plan, unit: float) -> dict[str, list[float]]:
    """Requests that replica 0 ended in each second, by policy, at 2x."""
    found = {}
    for policy in ("round_robin", "collm"):
        one = scenario(plan, policy, unit * 2)
        work = msgspec.structs.replace(one.workload, duration=SERVED_SECONDS)
        result = run(msgspec.structs.replace(one, workload=work))
        found[policy] = result["by_time"]["served"][0]
    return found


def fluid_bound(plan: Plan, result: Result) -> float:
    """min(offered, what all replicas could carry) in tokens/s; no policy can pass it."""
    from shared import profile

    hardware = profile.load(plan.profile)
    done = max(1, result["completed"])
    prompt = result["total_input_tokens"] / done
    output = result["total_output_tokens"] / done
    model = hardware.coefficients
    best = max(output * model.rate(b, 0, prompt, output) for b in range(1, hardware.b_max + 1))
    offered = result["total_output_tokens"] / done * result["offered"] / result["duration"]
    return float(min(offered, best * plan.replicas))
