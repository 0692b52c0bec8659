"""Pure decisions: how fast the dispatch policy decides, without Redis, on a long queue.

``python -m bench.dispatch``: 10^5 requests wait; each turn some requests in flight end, as many
arrive, and the policy decides. decisions_s = requests released per second of ``decide``,
with_events_s = the same with the calls for arrivals and completions; p99_ms of one ``decide``.
All in CPU time of the thread, so that neighbours on the machine do not count. Last line: JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from typing import NamedTuple

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
        started = time.thread_time()
        self.policy.on_arrival(request, self.now)
        self.spent += time.thread_time() - started

    def _complete(self, count: int) -> None:
        ended = [
            Completion(id=key, replica=replica, output_tokens=64, reason="length")
            for replica, key in (self.flying.popleft() for _ in range(min(count, len(self.flying))))
        ]
        started = time.thread_time()
        for completion in ended:
            self.policy.on_completion(completion, self.now)
        self.spent += time.thread_time() - started

    def forget(self) -> None:
        """Start measuring."""
        self.spent, self.released, self.calls = 0.0, 0, []

    def turn(self, seconds: float, count: int) -> None:
        """Time passes, ``count`` requests end, as many arrive as were released last."""
        self.now += seconds
        self._complete(count)
        started = time.thread_time()
        actions = self.policy.decide(self.now)
        taken = time.thread_time() - started
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


class Result(NamedTuple):
    """Requests released a CPU second: of decisions alone, with all events; p99 in ms."""

    decided: float
    handled: float
    p99: float


def measure(policy: str, replicas: int, seconds: float, seed: int) -> Result:
    """Fill the replicas, then measure for ``seconds``."""
    bench = Bench(policy, replicas, seed)
    for _ in range(50):  # fill the replicas
        bench.turn(0.005, 16)
    bench.spent, bench.released, bench.calls = 0.0, 0, []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        bench.turn(0.005, 16)
    calls = sorted(bench.calls)
    p99 = calls[int(0.99 * (len(calls) - 1))] * 1e3
    return Result(bench.released / sum(calls), bench.released / bench.spent, p99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="collm")
    parser.add_argument("--replicas", default="16,256,4096")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sizes = [int(n) for n in options.replicas.split(",")]
    runs: dict[int, list[Result]] = {n: [] for n in sizes}
    for repeat in range(options.repeats):
        for n in sizes:
            result = measure(options.policy, n, options.seconds, repeat)
            runs[n].append(result)
            print(f"{n} replicas: {result.decided:.0f} decisions/s, p99 {result.p99:.3f} ms")
    median = {n: Result(*map(statistics.median, zip(*runs[n], strict=True))) for n in sizes}
    report = {
        "bench": "dispatch",
        "policy": options.policy,
        "queued": QUEUED,
        "decisions_s": {str(n): round(median[n].decided) for n in sizes},
        "p99_ms": {str(n): round(median[n].p99, 4) for n in sizes},
        "with_events_s": {str(n): round(median[n].handled) for n in sizes},
        "spread": {
            str(n): [round(min(r.decided for r in runs[n])), round(max(r.decided for r in runs[n]))]
            for n in sizes
        },
    }
    print(orjson.dumps(report).decode())


if __name__ == "__main__":
    main()
