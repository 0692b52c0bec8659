"""Figures about the method itself: fit of the latency model, memory, cost against cluster size."""

from __future__ import annotations

from typing import Any

from bench.figures.runs import Plan, scenario
from bench.figures.store import Result, Store
from bench.sim import speed
from services.coordinator.fit import Plane, Sample, fit
from services.dispatcher.policies.base import StepSeen
from shared import profile
from sim.rounds import Federated
from sim.scenario import build

FIT_SAMPLES = 4000
MIXED = "alone and beside training, mixed"
SIZES = (16, 128, 1024, 10_000)
LORA_PARAMETERS = 42e6  # rank 16 on all linear layers of an 8B Llama: 16 (in + out) a matrix
BF16, FP32, ADAM = 2, 4, 3  # bytes; bytes; gradient and two moments a parameter


def fitted(plan: Plan, unit: float, store: Store) -> Result:
    """The coordinator's fit on what simulated replicas report, alone and beside training."""

    def find() -> Result:
        samples: dict[str, list[Sample]] = {"alone": [], "beside training": []}

        def note(step: StepSeen, now: float) -> None:
            if step.prefill_tokens or not step.decode_tokens:
                return
            kind = "beside training" if step.B else "alone"
            if len(samples["beside training"]) < FIT_SAMPLES:
                samples[kind].append(Sample(now, step.b, step.B, step.seconds / step.steps))

        federated = Federated(yielding=False)
        world = build(scenario(plan, "collm", unit * 2, 0, federated))
        world.observers.append(note)
        world.run()
        both = samples["alone"][-FIT_SAMPLES:] + samples["beside training"]
        planes = {
            "serving alone": fit(samples["alone"][-FIT_SAMPLES:], world.kernel.now, 1e9),
            MIXED: fit(both, world.kernel.now, 1e9),
        }
        return {
            "planes": {k: _plain(v) for k, v in planes.items()},
            "points": [(s.x, s.y, s.seconds) for s in both[:: max(1, len(both) // 600)]],
        }

    return store.known(["fit", MIXED, scenario(plan, "collm", unit * 2).saved()], find)


def _plain(plane: Plane | None) -> dict[str, float] | None:
    if plane is None:
        return None
    return {"r2": plane.r2, "r2_single": plane.r2_single, "samples": plane.samples}


def memory(plan: Plan) -> dict[str, dict[str, float]]:
    """GB of one replica's GPUs, computed from the profile and published sizes: not measured."""
    hardware = profile.load(plan.profile)
    weights = 8.03e9 * BF16 / 1e9
    kv = hardware.kv_tokens * 32 * 8 * 128 * 2 * BF16 / 1e9
    adapter = LORA_PARAMETERS * BF16 / 1e9
    optimizer = LORA_PARAMETERS * ADAM * FP32 / 1e9
    shared = {"base weights": weights, "adapters": 2 * adapter, "optimizer": optimizer, "KV": kv}
    apart = {**shared, "base weights": 2 * weights}
    return {"one copy (CoLLM)": shared, "a copy each": apart}


def cost(store: Store, requests: int, policy: str = "collm") -> dict[int, Any]:
    """Requests a CPU second by cluster size, each in a process of its own."""
    found = {}
    for size in SIZES:
        what = ["cost", size, requests, policy]
        found[size] = store.known(what, lambda size=size: speed(size, requests, policy))  # type: ignore[misc]
        store.say(f"{size} replicas: {found[size]}")
    return found
