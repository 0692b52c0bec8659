"""dLoRA's cluster policies (Wu et al., OSDI'24), as the authors' artifact runs them.

Proactive: each request, when it arrives, to the replica with the least cost
0.6 * sum_k floor(n_k / B) + floor(sum_k (n_k mod B) / B), n_k its requests of adapter k: full
batches of one adapter are cheap because they can run merged. Reactive: every 10 s, if the busiest
replica has at least 16 requests more than the mean, requests move to the emptiest one.

Adaptations: the integer program of the reactive part is the pairwise greedy one (newest requests
move first: they have not started); every replica can load every adapter, so placement is the
dispatch itself. When to merge, dLoRA's third part, is decided by the replica in each iteration, by
``services.replica.merging``: emulated and simulated replicas with ``lora: dynamic`` do so.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.dispatcher.policies.base import Action, Completion, Preempt, Request
from services.dispatcher.policies.fcfs import FirstCome
from services.dispatcher.policies.fleet import Member

MERGED_COST = 0.6  # of a full batch of one adapter, relative to an unmerged one
PERIOD_SECONDS = 10.0
IMBALANCE = 16  # requests above the mean that start a migration
MOVED_MAX = 64


class Dlora(FirstCome):
    name = "dlora"

    def __init__(self, *, batch: int = 32) -> None:
        super().__init__()
        self._batch = batch
        self._counts: dict[str, dict[str | None, int]] = {}  # replica -> adapter -> requests
        self._next = PERIOD_SECONDS
        self._started = False

    def choose(self, request: Request, candidates: list[Member]) -> Member:
        best = min(candidates, key=lambda m: (self._cost(m, request.adapter), m.load))
        self._count(best.view.id, request.adapter, 1)
        return best

    def _cost(self, member: Member, adapter: str | None) -> float:
        """Cost of the replica with one more request of the adapter."""
        counts = dict(self._counts.get(member.view.id, {}))
        counts[adapter] = counts.get(adapter, 0) + 1
        full = sum(n // self._batch for n in counts.values())
        rest = sum(n % self._batch for n in counts.values())
        return MERGED_COST * full + rest // self._batch

    def _count(self, replica: str, adapter: str | None, change: int) -> None:
        counts = self._counts.setdefault(replica, {})
        counts[adapter] = counts.get(adapter, 0) + change
        if counts[adapter] <= 0:
            del counts[adapter]

    # ------------------------------------------------------------ books

    def on_completion(self, completion: Completion, now: float) -> None:
        ended = self.fleet.finish(completion)
        if ended is not None:
            self._count(completion.replica, ended[1].adapter, -1)

    def on_replica_gone(self, replica_id: str, now: float) -> None:
        super().on_replica_gone(replica_id, now)
        self._counts.pop(replica_id, None)

    def restore(self, replica_id: str, requests: Sequence[Request], now: float) -> None:
        super().restore(replica_id, requests, now)
        if replica_id in self.fleet:
            for request in requests:
                self._count(replica_id, request.adapter, 1)

    # ------------------------------------------------------------ migration

    def decide(self, now: float) -> list[Action]:
        actions = super().decide(now)
        if not self._started:
            self._started, self._next = True, now + PERIOD_SECONDS
        elif now >= self._next:
            self._next = now + PERIOD_SECONDS
            actions += self._migrate()
        return actions

    def next_wake(self, now: float) -> float | None:
        return self._next if self._started else None

    def _migrate(self) -> list[Action]:
        serving = self.fleet.dispatchable()
        if len(serving) < 2:
            return []
        busiest = max(serving, key=lambda m: m.load)
        emptiest = min(serving, key=lambda m: m.load)
        mean = sum(m.load for m in serving) / len(serving)
        if busiest.load < mean + IMBALANCE:
            return []
        count = min(MOVED_MAX, (busiest.load - emptiest.load) // 2)
        newest = list(busiest.flight)[-count:]
        return [Preempt(replica=busiest.view.id, requests=tuple(newest))]
