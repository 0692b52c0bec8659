"""How long a request was kept back on purpose: it waited although a replica had a free place.

Pure. One clock a model that runs while any dispatchable replica is below its concurrency limit;
the time it shows between a request's arrival and its release is what the policy held it back.
Waiting while every replica is full is queueing, not holding.
"""

from __future__ import annotations

from services.dispatcher.policies.base import ReplicaView


class CreditClock:
    """Seconds during which some replica had credit. Every change costs O(1)."""

    def __init__(self) -> None:
        self._limit: dict[str, int] = {}  # dispatchable replicas only
        self._load: dict[str, int] = {}
        self._free = 0  # dispatchable replicas below their limit
        self._ran = 0.0
        self._since: float | None = None  # since when it runs

    def seconds(self, now: float) -> float:
        """What the clock shows at ``now``."""
        return self._ran + (0.0 if self._since is None else max(0.0, now - self._since))

    def see(self, view: ReplicaView, now: float) -> None:
        """A replica is new or changed."""
        before = self._has_credit(view.id)
        if view.dispatchable:
            self._limit[view.id] = view.b_limit
        else:
            self._limit.pop(view.id, None)
        self._update(before, self._has_credit(view.id), now)

    def gone(self, replica: str, now: float) -> None:
        """A replica is gone with what it had in flight."""
        before = self._has_credit(replica)
        self._limit.pop(replica, None)
        self._load.pop(replica, None)
        self._update(before, False, now)

    def loaded(self, replica: str, change: int, now: float) -> None:
        """So many requests more (or fewer) are in flight on a replica."""
        before = self._has_credit(replica)
        self._load[replica] = self._load.get(replica, 0) + change
        self._update(before, self._has_credit(replica), now)

    def _has_credit(self, replica: str) -> bool:
        return self._load.get(replica, 0) < self._limit.get(replica, 0)

    def _update(self, before: bool, after: bool, now: float) -> None:
        self._free += after - before
        if self._free and self._since is None:
            self._since = now
        elif not self._free and self._since is not None:
            self._ran, self._since = self.seconds(now), None
