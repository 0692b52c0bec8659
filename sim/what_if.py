"""What a cluster would carry: the largest load scale that keeps the SLO, and what is left to train.

Load is scaled by compressing the trace's time. "Sustained" means that attainment stays at
``target`` of what the same cluster reaches unloaded (long answers may miss an end-to-end limit on
any system).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sim.rounds import Federated
from sim.scenario import Scenario, ScenarioError, check, run

UNLOADED = 0.05  # scale at which requests hardly meet one another
PRECISION = 1.04  # the answer is right to 4 %
MOST_DOUBLINGS = 14


def at_scale(scenario: Scenario, scale: float, federated: Federated | None = None) -> Scenario:
    """The same requests, ``scale`` times as fast."""
    work = msgspec.structs.replace(scenario.workload, rate_scale=scale)
    return msgspec.structs.replace(scenario, workload=work, federated=federated)


def answer(
    scenario: Scenario, *, target: float = 0.9, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Largest sustainable scale and the training throughput beside it and at scale 1.

    ``took_s`` is the seconds that the answer took by the clock. Raises ScenarioError when the
    workload has no SLO or ends at once, or a value is out of range.
    """
    started = time.perf_counter()
    check(scenario)
    if not 0 < target <= 1:
        raise ScenarioError(f"above 0 and at most 1 expected, not {target:g}", "target")
    if not any(scenario.workload.slos.values()):
        raise ScenarioError("what is to be sustained? give --slo, e.g. --slo e2e:2s")
    attained: dict[float, dict[str, Any]] = {}

    def attainment(scale: float) -> float:
        result = attained[scale] = run(at_scale(scenario, scale))
        if result["slo_attainment"] is None:
            raise ScenarioError("the workload holds no request")
        say(f"scale {scale:.3g}: attainment {result['slo_attainment']:.3f}")
        return float(result["slo_attainment"])

    unloaded = attainment(UNLOADED)
    needed = target * unloaded
    best = _largest(attainment, needed)
    federated = scenario.federated or Federated()
    say(f"beside training: scales 1 and {best:.3g}")
    runs = {
        name: run(at_scale(scenario, scale, federated))
        for name, scale in (("at_scale_1", 1.0), ("at_largest_scale", best))
    }
    training = {name: result["training"] for name, result in runs.items()}
    at_best = attained[best]
    return {
        "what_if": True,
        "simulated": True,
        "profile": scenario.profile,
        "replicas": scenario.replicas,
        "policy": scenario.policy,
        "target": target,
        "unloaded_attainment": unloaded,
        "largest_scale": best,
        "requests_per_s": at_best["request_throughput"],
        "goodput_tokens_per_s": at_best["goodput_tokens_per_s"],
        "slo_attainment": at_best["slo_attainment"],
        "utilisation": at_best["utilisation"],
        "slo_attainment_while_training": {k: v["slo_attainment"] for k, v in runs.items()},
        "training_samples_per_s": {k: v["samples_per_s"] for k, v in training.items()},
        "training_compute_share": {k: v["compute_share"] for k, v in training.items()},
        "tried": {f"{s:.4g}": attained[s]["slo_attainment"] for s in sorted(attained)},
        "took_s": round(time.perf_counter() - started, 2),
        "scenario": scenario.saved(),
    }


def target_of(path: Path) -> float | None:
    """Of a saved what-if (``what_if.json``); None where the file holds none, or is no JSON."""
    try:
        plain = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None  # `sim.scenario.read` says what is wrong
    if not isinstance(plain, dict) or not plain.get("what_if"):
        return None
    target = plain.get("target")
    if not isinstance(target, int | float):
        raise ScenarioError(f"{path}: a number expected as target, not {target!r}")
    return float(target)


def _largest(attainment: Callable[[float], float], needed: float) -> float:
    """Double until it breaks, then halve the interval (on a log scale)."""
    low, high = UNLOADED, 0.0
    scale = 1.0
    for _ in range(MOST_DOUBLINGS):
        if attainment(scale) >= needed:
            low, scale = scale, scale * 2
        else:
            high = scale
            break
    if not high:
        return low
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        if attainment(middle) >= needed:
            low = middle
        else:
            high = middle
    return low
