"""The waiting requests of the pacing policy, in heaps: every change costs O(log n).

A request is in one place: main (can make it), deferred (given up by the plan, served where room
is left), late (hopeless) or apart (no replica that serves holds it). What left a place stays in its
heap until it comes up or the stale entries are the majority.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from services.dispatcher.policies.parts.waiting import (
    APART,
    DEFERRED,
    GONE,
    LATE,
    MAIN,
    Item,
    Waiting,
)

STALE_MAX = 64  # stale heap entries that never matter

LateItem = tuple[int, Waiting]  # order of entry


class Queues:
    """``waiting``: all of them by key. Heaps are lists of (key, key, order of entry, request)."""

    def __init__(self) -> None:
        self.waiting: dict[str, Waiting] = {}
        self.main: list[Item] = []  # (-priority, latest)
        self.valued: dict[str, list[Item]] = {}  # main, too, by tenant: (-priority, -density)
        self.deferred: list[Item] = []  # (-priority, -density)
        self.given_up: dict[str, list[Item]] = {}  # deferred, too, by tenant
        self.expiry: list[Item] = []  # all but late ones with a limit to keep: (latest, 0)
        self.patience: list[Item] = []  # those without one: (latest, 0)
        self.apart: list[Item] = []  # (tokens, 0)
        self.late: dict[str, deque[LateItem]] = {}  # by tenant, in order of entry
        self.late_count = 0
        self.main_cost = 0.0  # replica seconds that main takes
        self._order = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def enter(self, w: Waiting, place: int) -> None:
        """A request is new."""
        self.waiting[w.request.id] = w
        self._push(self.expiry if w.bound else self.patience, w.latest, 0.0, w)
        self.put(w, place)

    def put(self, w: Waiting, place: int) -> None:
        """Move to another place."""
        self._leave(w)
        w.place = place
        tenant = w.request.tenant
        if place == LATE:
            self._order += 1
            self.late.setdefault(tenant, deque()).append((self._order, w))
            self.late_count += 1
        elif place == APART:
            self._push(self.apart, w.kv, 0.0, w)
        elif place == MAIN:
            self.main_cost += w.cost
            self._push(self.main, -w.request.priority, w.latest, w)
            valued = self.valued.setdefault(tenant, [])
            self._push(valued, -w.request.priority, -w.density, w)
        else:
            self._push(self.deferred, -w.request.priority, -w.density, w)
            given_up = self.given_up.setdefault(tenant, [])
            self._push(given_up, -w.request.priority, -w.density, w)

    def remove(self, w: Waiting) -> None:
        """It no longer waits."""
        self._leave(w)
        w.place = GONE
        del self.waiting[w.request.id]
        if not self.waiting:
            self.main_cost = 0.0  # what rounding has left

    def _leave(self, w: Waiting) -> None:
        if w.place == LATE:
            self.late_count -= 1
        elif w.place == MAIN:
            self.main_cost -= w.cost

    def expire(self, now: float) -> int:
        """Requests whose slack is used up are late from now on; returns how many.

        One without a limit has waited long then: it comes before all that its tenant has.
        """
        expired = 0
        while self.expiry and self.expiry[0][0] < now:
            w = heapq.heappop(self.expiry)[3]
            if w.place in (MAIN, DEFERRED, APART):
                self.put(w, LATE)
                expired += 1
        while self.patience and self.patience[0][0] < now:
            w = heapq.heappop(self.patience)[3]
            if w.place == MAIN:
                self._prefer(w)
        return expired

    def _prefer(self, w: Waiting) -> None:
        valued = self.valued.setdefault(w.request.tenant, [])
        self._push(valued, -w.request.priority, -math.inf, w)

    # ------------------------------------------------------------ late and apart

    def late_heads(self) -> dict[str, LateItem]:
        """The oldest hopeless request of each tenant that has one."""
        heads = {}
        for tenant in list(self.late):
            line = self.late[tenant]
            while line and line[0][1].place != LATE:
                line.popleft()
            if line:
                heads[tenant] = line[0]
            else:
                del self.late[tenant]
        return heads

    def oldest_late(self) -> Waiting | None:
        heads = self.late_heads()
        return min(heads.values())[1] if heads else None

    def next_late(self, tenant: str) -> LateItem | None:
        """Take the tenant's oldest out of its line; it is released or given back."""
        line = self.late.get(tenant)
        while line:
            item = line.popleft()
            if item[1].place == LATE:
                return item
        return None

    def give_back(self, items: list[LateItem]) -> None:
        """Hopeless ones that were taken out and not released, in the order taken."""
        for item in reversed(items):
            self.late.setdefault(item[1].request.tenant, deque()).appendleft(item)

    def smallest_apart(self) -> int | None:
        """Tokens of the smallest request that no serving replica holds; None: there is none."""
        while self.apart and self.apart[0][3].place != APART:
            heapq.heappop(self.apart)
        return self.apart[0][3].kv if self.apart else None

    def rejoin(self, largest: float, now: float) -> None:
        """A replica holds requests of up to ``largest`` tokens: those are apart no longer."""
        while (tokens := self.smallest_apart()) is not None and tokens <= largest:
            w = heapq.heappop(self.apart)[3]
            waited = w.latest < now
            self.put(w, LATE if waited and w.bound else MAIN)
            if waited and not w.bound:
                self._prefer(w)

    # ------------------------------------------------------------ upkeep

    def compact(self) -> None:
        """Throw out stale entries once they are the majority."""
        limit = 2 * len(self.waiting) + STALE_MAX
        for heap, places in (
            (self.main, (MAIN,)),
            (self.deferred, (DEFERRED,)),
            (self.expiry, (MAIN, DEFERRED, APART)),
            (self.patience, (MAIN, APART)),
            (self.apart, (APART,)),
        ):
            if len(heap) > limit:
                _clean(heap, places)
        self.valued = _cleaned(self.valued, MAIN, limit)
        self.given_up = _cleaned(self.given_up, DEFERRED, limit)

    def _push(self, heap: list[Item], first: float, second: float, w: Waiting) -> None:
        self._order += 1
        heapq.heappush(heap, (first, second, self._order, w))


def _cleaned(heaps: dict[str, list[Item]], place: int, limit: int) -> dict[str, list[Item]]:
    if sum(map(len, heaps.values())) <= limit:
        return heaps
    for heap in heaps.values():
        _clean(heap, (place,))
    return {tenant: heap for tenant, heap in heaps.items() if heap}


def _clean(heap: list[Item], places: tuple[int, ...]) -> None:
    """What waits in one of the places, once each."""
    first: dict[Waiting, Item] = {}
    for item in heap:
        w = item[3]
        if w.place in places and (w not in first or item < first[w]):
            first[w] = item
    heap[:] = first.values()
    heapq.heapify(heap)
