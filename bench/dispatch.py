"""Pure decisions: how fast the dispatch policy decides, without Redis, on a long queue.

``python -m bench.dispatch``: 10^5 requests wait; each turn some requests in flight end, as many
arrive, and the policy decides. decisions_s = requests released per second of all calls of the
policy (arrivals, completions, decisions); p99_ms of one call of ``decide``. Last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque

import orjson

from services.dispatcher.policies.base import Completion, Policy, Release, ReplicaView, Request
from services.dispatcher.policies.registry import create
from shared.latency import LatencyModel

QUEUED = 100_000
# So fast that credit, not the engine, is what limits: the policy has work in every call.
LATENCY = LatencyModel(alpha0=1e-4, alpha1=1e-7, pi0=1e-5, pi1=1e-8)


def _request(number: int, now: float, rng: random.Random) -> Request:
    """Lengths of a chat, a deadline between half a minute and two minutes away."""
    return Request(
        id=f"r{number}",
        arrival=now,
        prompt_tokens=rng.randint(16, 512),
        max_tokens=rng.randint(8, 128),
        tenant=f"t{number % 8}",
        deadline=now + rng.uniform(30.0, 120.0),
    )


class Bench:
    """One policy with ``replicas`` replicas and QUEUED waiting requests on virtual time."""

    def __init__(self, policy: str, replicas: int, seed: int) -> None:
        self.policy: Policy = create(policy)
        self.rng = random.Random(seed)
        self.now, self.number = 0.0, 0
        self.flying: deque[tuple[str, str]] = deque()
        self.spent, self.released = 0.0, 0
        self.calls: list[float] = []
        for k in range(replicas):
            view = ReplicaView(
                id=f"replica-{k}", dispatchable=True, b_limit=16, b_max=16, latency=LATENCY
            )
            self.policy.on_replica(view, 0.0)
        self.policy.decide(0.0)
        for _ in range(QUEUED):
            self._arrive()
        self.spent = 0.0

    def _arrive(self) -> None:
        request = _request(self.number, self.now, self.rng)
        self.number += 1
        started = time.perf_counter()
        self.policy.on_arrival(request, self.now)
        self.spent += time.perf_counter() - started

    def _complete(self, count: int) -> None:
        ended = [
            Completion(id=key, replica=replica, output_tokens=64, reason="length")
            for replica, key in (self.flying.popleft() for _ in range(min(count, len(self.flying))))
        ]
        started = time.perf_counter()
        for completion in ended:
            self.policy.on_completion(completion, self.now)
        self.spent += time.perf_counter() - started

    def turn(self, seconds: float, count: int) -> None:
        """Time passes, ``count`` requests end, as many arrive as were released last."""
        self.now += seconds
        self._complete(count)
        started = time.perf_counter()
        actions = self.policy.decide(self.now)
        taken = time.perf_counter() - started
        self.spent += taken
        self.calls.append(taken)
        released = 0
        for action in actions:
            if isinstance(action, Release):
                self.flying.extend((action.replica, key) for key in action.requests)
                released += len(action.requests)
        self.released += released
        for _ in range(released):
            self._arrive()


def measure(policy: str, replicas: int, seconds: float, seed: int) -> tuple[float, float]:
    """(requests released a second, p99 of one decision in ms)."""
    bench = Bench(policy, replicas, seed)
    for _ in range(50):  # fill the replicas
        bench.turn(0.005, 16)
    bench.spent, bench.released, bench.calls = 0.0, 0, []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        bench.turn(0.005, 16)
    calls = sorted(bench.calls)
    return bench.released / bench.spent, calls[int(0.99 * (len(calls) - 1))] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="collm")
    parser.add_argument("--replicas", default="16,256,4096")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sizes = [int(n) for n in options.replicas.split(",")]
    runs: dict[int, list[tuple[float, float]]] = {n: [] for n in sizes}
    for repeat in range(options.repeats):
        for n in sizes:
            rate, p99 = measure(options.policy, n, options.seconds, repeat)
            runs[n].append((rate, p99))
            print(f"{n} replicas: {rate:.0f} requests/s, p99 {p99:.3f} ms")
    result = {
        "bench": "dispatch",
        "policy": options.policy,
        "queued": QUEUED,
        "decisions_s": {str(n): round(statistics.median(r for r, _ in runs[n])) for n in sizes},
        "p99_ms": {str(n): round(statistics.median(p for _, p in runs[n]), 4) for n in sizes},
        "spread": {
            str(n): [round(min(r for r, _ in runs[n])), round(max(r for r, _ in runs[n]))]
            for n in sizes
        },
    }
    print(orjson.dumps(result).decode())


if __name__ == "__main__":
    main()
