"""Drives a policy on virtual time: requests end after a time that only the driver knows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from msgspec.structs import replace

from services.dispatcher.policies.base import (
    Completion,
    Policy,
    Preempt,
    Promote,
    Release,
    ReplicaView,
    Request,
    Shed,
)

STATES = {
    "serving": {"dispatchable": True, "idle": False, "training": False, "B": 0},
    "combined": {"dispatchable": True, "idle": False, "training": True, "B": 4},
    "idle": {"dispatchable": False, "idle": True, "training": False, "B": 0},
}
TURNS_MAX = 20_000  # of the loop; more means that the policy spins


class Driver:
    """Checks at every release what must always hold; ``releases`` is the record."""

    def __init__(self, policy: Policy, seconds_each: float) -> None:
        self.policy, self._seconds = policy, seconds_each
        self.now = 0.0
        self.views: dict[str, ReplicaView] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: set[str] = set()
        self.flying: dict[str, str] = {}
        self.releases: list[tuple[float, Release]] = []
        self.shed: list[str] = []
        self.ended: list[str] = []
        self._events: list[tuple[float, int, object]] = []
        self._order = 0

    def move(self, time: float, replica: str, state: str) -> None:
        """A replica begins to serve, to idle or to train beside (combined), if it is alive then."""
        self.at(time, (replica, state))

    def at(
        self, time: float, event: Request | ReplicaView | Completion | tuple[str, str] | str
    ) -> None:
        """A request arrives, a replica changes, a request ends, a replica (its id) is gone."""
        self._order += 1
        heapq.heappush(self._events, (time, self._order, event))

    def run(self) -> None:
        """Until nothing is to come and the policy wants nothing more that changes anything."""
        for _ in range(TURNS_MAX):
            wake = self.policy.next_wake(self.now)
            due = self._events[0][0] if self._events else None
            if due is None and not self.waiting:
                return
            times = [t for t in (due, wake) if t is not None]
            if not times:
                return
            self.now = max(self.now, min(times))
            while self._events and self._events[0][0] <= self.now:
                self._happen(heapq.heappop(self._events)[2])
            self._decide()
            if due is None and self.now > 10_000:
                return
        raise AssertionError("the policy spins: no end after many turns")

    def _happen(self, event: object) -> None:
        match event:
            case Request():
                self.requests[event.id] = event
                self.waiting.add(event.id)
                self.policy.on_arrival(event, self.now)
            case ReplicaView():
                self.views[event.id] = event
                self.policy.on_replica(event, self.now)
            case Completion():
                if self.flying.get(event.id) == event.replica:
                    del self.flying[event.id]
                    self.ended.append(event.id)
                    self.policy.on_completion(event, self.now)
            case (str(replica), str(state)):
                if replica in self.views:
                    self._happen(replace(self.views[replica], **STATES[state]))
            case str():
                self._gone(event)

    def _gone(self, replica: str) -> None:
        """Its requests come back as new attempts, as their gateways would send them."""
        self.views.pop(replica, None)
        self.policy.on_replica_gone(replica, self.now)
        for key in [k for k, r in self.flying.items() if r == replica]:
            del self.flying[key]
            self._again(key)

    def _again(self, key: str) -> None:
        old = self.requests[key]
        self._happen(
            Request(
                id=f"{key}+",
                arrival=old.arrival,
                prompt_tokens=old.prompt_tokens,
                max_tokens=old.max_tokens,
                deadline=old.deadline,
                tenant=old.tenant,
                attempt=old.attempt + 1,
            )
        )

    def _decide(self) -> None:
        for action in self.policy.decide(self.now):
            match action:
                case Release():
                    self._release(action)
                case Shed():
                    self.waiting.remove(action.request)
                    self.shed.append(action.request)
                    assert action.retry_after > 0
                case Promote():
                    view = self.views[action.replica]
                    assert view.idle, "only Idle replicas are promoted"
                    self.move(self.now, view.id, "serving")
                case Preempt():
                    for key in action.requests:
                        if self.flying.pop(key, None) is not None:
                            self.policy.on_completion(
                                Completion(
                                    id=key,
                                    replica=action.replica,
                                    output_tokens=0,
                                    reason="cancelled",
                                ),
                                self.now,
                            )
                            self._again(key)

    def _release(self, action: Release) -> None:
        self.releases.append((self.now, action))
        view = self.views.get(action.replica)
        assert view is not None, "released to a replica that is gone"
        assert view.dispatchable, "released to a replica that takes nothing"
        for key in action.requests:
            assert key in self.waiting, f"{key} is released twice, or before it came"
            assert self.requests[key].arrival <= self.now + 1e-9
            self.waiting.remove(key)
            self.flying[key] = action.replica
            end = Completion(id=key, replica=action.replica, output_tokens=8, reason="length")
            self.at(self.now + self._seconds, end)
        load = sum(1 for replica in self.flying.values() if replica == action.replica)
        assert load <= view.b_limit, f"{load} in flight, {view.b_limit} allowed"

    def order_of(self, key: str) -> int:
        """Position of a request among all releases."""
        released: Sequence[str] = [k for _, r in self.releases for k in r.requests]
        return released.index(key)
