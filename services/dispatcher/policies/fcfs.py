"""First come, first served: the frame of the simple policies. A subclass says which replica.

A request waits in order of arrival until a replica that fits it has credit. One that fits no
replica with credit is passed over, so it holds up nobody; one that no serving replica could ever
hold waits apart, and an Idle one that could is promoted for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from services.dispatcher.policies.apart import Apart
from services.dispatcher.policies.base import (
    Action,
    Completion,
    Promote,
    Release,
    ReplicaView,
    Request,
    StepSeen,
)
from services.dispatcher.policies.fleet import Fleet, Member

PASSED_OVER_MAX = 64  # requests looked at beyond the first that fits nowhere now


class FirstCome(ABC):
    """Implements the Policy interface; ``choose`` is the policy."""

    name = "fcfs"

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._queue: dict[str, Request] = {}
        self._apart = Apart()

    @abstractmethod
    def choose(self, request: Request, candidates: list[Member]) -> Member:
        """The replica for a request; every candidate fits and has credit."""

    def on_arrival(self, request: Request, now: float) -> None:
        self._queue[request.id] = request

    def on_cancel(self, request_id: str, now: float) -> bool:
        return self._queue.pop(request_id, None) is not None or self._apart.drop(request_id)

    def on_replica(self, replica: ReplicaView, now: float) -> None:
        self.fleet.tell(replica)

    def on_replica_gone(self, replica_id: str, now: float) -> None:
        self.fleet.drop(replica_id)

    def on_completion(self, completion: Completion, now: float) -> None:
        self.fleet.finish(completion)

    def on_step(self, step: StepSeen, now: float) -> None:
        return None  # needs no latencies

    def restore(self, replica_id: str, requests: Sequence[Request], now: float) -> None:
        member = self.fleet.get(replica_id)
        if member is not None:
            self.fleet.assign(member, requests)

    def next_wake(self, now: float) -> float | None:
        return None

    def queued(self) -> int:
        return len(self._queue) + len(self._apart)

    def members(self) -> list[Member]:
        """The replicas that requests may go to, in any state."""
        return list(self.fleet)

    def decide(self, now: float) -> list[Action]:
        if not self.queued():
            return []
        members = self.members()
        serving = [m for m in members if m.view.dispatchable]
        idle = [m for m in members if m.view.idle]
        if not serving:
            return [
                Promote(replica=m.view.id, why={"queued": self.queued()}) for m in self._best(idle)
            ]
        back = self._apart.look(serving)
        if back:  # they came before those that came since
            self._queue = {r.id: r for r in back} | self._queue
        batches = self._fill([m for m in serving if m.credit > 0])
        return self._apart.promotion(idle) + [
            Release(
                replica=replica,
                requests=tuple(r.id for r in batch),
                why={
                    "in_flight": self.fleet[replica].load,
                    "limit": self.fleet[replica].view.b_limit,
                },
            )
            for replica, batch in batches.items()
        ]

    def _fill(self, free: list[Member]) -> dict[str, list[Request]]:
        """Assign queued requests while replicas have credit; replica id -> batch."""
        batches: dict[str, list[Request]] = {}
        taken: list[Request] = []
        passed = 0
        for request in self._queue.values():
            if not free or passed > PASSED_OVER_MAX:
                break
            if self._apart.takes(request):
                taken.append(request)
                continue
            candidates = self._candidates(request, free)
            if not candidates:
                passed += 1
                continue
            member = self.choose(request, candidates)
            self.fleet.assign(member, (request,))
            batches.setdefault(member.view.id, []).append(request)
            taken.append(request)
            if member.credit <= 0:
                free.remove(member)
        for request in taken:
            del self._queue[request.id]
        return batches

    def _best(self, idle: list[Member]) -> list[Member]:
        """The Idle replica to promote when nobody serves: one that holds the oldest request."""
        oldest = next(iter(self._queue.values()), None)
        fitting = [m for m in idle if oldest is None or m.fits(oldest)]
        return (fitting or idle)[:1]

    def _candidates(self, request: Request, free: list[Member]) -> list[Member]:
        """Replicas with credit that fit; those that hold the adapter if there are any."""
        fitting = [m for m in free if m.fits(request)]
        return [m for m in fitting if m.holds(request)] or fitting
