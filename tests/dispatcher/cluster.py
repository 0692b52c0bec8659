"""A cluster that the macro cycle of the pacing policy looks at."""

from __future__ import annotations

from services.dispatcher.policies.base import ReplicaView
from services.dispatcher.policies.collm import Collm
from services.dispatcher.policies.parts.macro import Macro
from services.dispatcher.policies.parts.waiting import Waiting
from shared.latency import LatencyModel
from tests.dispatcher.made import request, told, view

# Two requests of 100 and 10 tokens at a time: 0.2 + 0.1 + 10 * 0.04 s.
MODEL = LatencyModel(alpha0=0.02, alpha1=0.01, pi0=0.1, pi1=0.001)
RATE = 2 / 0.7
SLOW = LatencyModel(alpha0=0.04, alpha1=0.01, pi0=0.3, pi1=0.001)


def known(key: str, **more: object) -> ReplicaView:
    return view(key, **({"latency": MODEL} | more))


def cluster(*views: ReplicaView, asked: int = 0, **options: object) -> Collm:
    """Told of the replicas at 0; ``asked`` requests in the second until 1, then a cycle."""
    policy = Collm(**options)  # type: ignore[arg-type]
    told(policy, *views)
    policy.macro.cycle(policy, 0.0)
    for n in range(asked):
        arrive(policy.macro, f"q{n}")
    policy.macro.cycle(policy, 1.0)
    return policy


def arrive(macro: Macro, key: str = "q", *, hopeless: bool = False, **more: object) -> None:
    made = request(key, **more)
    macro.arrived(Waiting(made, float(made.max_tokens), 0.5, 9.0, 0.0), hopeless=hopeless)


def order(policy: Collm) -> list[str]:
    return [lane.view.id for lane in policy.macro.order]
