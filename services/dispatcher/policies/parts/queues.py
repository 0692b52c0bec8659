"""The waiting requests of the pacing policy, in heaps: every change costs O(log n).

A request is in one place: main (can make it), deferred (given up by the plan, served where room
is left), late (hopeless). What left a place stays in its heap until it comes up or the stale
entries are the majority.
"""

from __future__ import annotations

import heapq
from collections import deque

from services.dispatcher.policies.parts.waiting import DEFERRED, GONE, LATE, MAIN, Item, Waiting

STALE_MAX = 64  # stale heap entries that never matter


class Queues:
    """``waiting``: all of them by key. Heaps are lists of (key, key, order of entry, request)."""

    def __init__(self) -> None:
        self.waiting: dict[str, Waiting] = {}
        self.main: list[Item] = []  # (-priority, latest)
        self.valued: dict[str, list[Item]] = {}  # main, too, by tenant: (-priority, -density)
        self.deferred: list[Item] = []  # (-priority, -density)
        self.expiry: list[Item] = []  # main and deferred with a limit to keep: (latest, 0)
        self._late: deque[Waiting] = deque()
        self.late_count = 0
        self.main_cost = 0.0  # replica seconds that main takes
        self._order = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def enter(self, w: Waiting, place: int) -> None:
        """A request is new."""
        self.waiting[w.request.id] = w
        if w.bound:
            self._push(self.expiry, w.latest, 0.0, w)
        self.put(w, place)

    def put(self, w: Waiting, place: int) -> None:
        """Move to another place."""
        if w.place == MAIN:
            self.main_cost -= w.cost
        w.place = place
        if place == LATE:
            self._late.append(w)
            self.late_count += 1
        elif place == MAIN:
            self.main_cost += w.cost
            self._push(self.main, -w.request.priority, w.latest, w)
            valued = self.valued.setdefault(w.request.tenant, [])
            self._push(valued, -w.request.priority, -w.density, w)
        else:
            self._push(self.deferred, -w.request.priority, -w.density, w)

    def remove(self, w: Waiting) -> None:
        """It no longer waits."""
        if w.place == LATE:
            self.late_count -= 1
        elif w.place == MAIN:
            self.main_cost -= w.cost
        w.place = GONE
        del self.waiting[w.request.id]
        if not self.waiting:
            self.main_cost = 0.0  # what rounding has left

    def expire(self, now: float) -> int:
        """Requests whose slack is used up are late from now on; returns how many."""
        expired = 0
        while self.expiry and self.expiry[0][0] < now:
            w = heapq.heappop(self.expiry)[3]
            if w.place in (MAIN, DEFERRED):
                self.put(w, LATE)
                expired += 1
        return expired

    def overdue(self, now: float) -> bool:
        """Whether the head of main has waited past its latest start (it has no SLO then)."""
        while self.main and self.main[0][3].place != MAIN:
            heapq.heappop(self.main)
        return bool(self.main) and self.main[0][1] < now

    def oldest_late(self) -> Waiting | None:
        while self._late and self._late[0].place != LATE:
            self._late.popleft()
        return self._late[0] if self._late else None

    def compact(self) -> None:
        """Throw out stale entries once they are the majority."""
        limit = 2 * len(self.waiting) + STALE_MAX
        for heap, places in (
            (self.main, (MAIN,)),
            (self.deferred, (DEFERRED,)),
            (self.expiry, (MAIN, DEFERRED)),
        ):
            if len(heap) > limit:
                _clean(heap, places)
        if sum(map(len, self.valued.values())) > limit:
            for heap in self.valued.values():
                _clean(heap, (MAIN,))
            self.valued = {tenant: heap for tenant, heap in self.valued.items() if heap}

    def _push(self, heap: list[Item], first: float, second: float, w: Waiting) -> None:
        self._order += 1
        heapq.heappush(heap, (first, second, self._order, w))


def _clean(heap: list[Item], places: tuple[int, ...]) -> None:
    heap[:] = [item for item in heap if item[3].place in places]
    heapq.heapify(heap)
