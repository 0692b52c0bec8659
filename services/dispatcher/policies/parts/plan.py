"""Which of the waiting requests can all make it, and which are the ones to give up first.

The plan's outcome is a price, in tokens a replica second: 0 while all can make it, under overload
the value of the best request that is given up.

Moore and Hodgson's rule for one machine, weighted, with the active replicas taken as one machine
that many times as fast: go through the requests in order of their latest start; whenever the work
so far does not fit, give up the request with fewest tokens per second of replica time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.dispatcher.policies.parts.lane import INFINITY
from services.dispatcher.policies.parts.macro import Macro
from services.dispatcher.policies.parts.queues import Queues
from services.dispatcher.policies.parts.waiting import DEFERRED, MAIN, Item, Waiting

PLANNED_MAX = 256  # requests looked at: those with the least slack
REPLAN_SECONDS = 0.01
REPLAN_SHARE = 0.02  # of the slack of the requests planned: how long a plan holds
REPLAN_MAX = 0.5


class Plan:
    """``changed``: something has arrived since the last plan."""

    def __init__(self, queues: Queues, macro: Macro) -> None:
        self._queues, self._macro = queues, macro
        self.price = 0.0
        self.changed = False
        self._next = -INFINITY

    def renew(self, now: float) -> None:
        """Set the price and move requests between main and deferred accordingly."""
        # A price is looked at again though nothing came: with what was given up it is gone.
        if now < self._next or not (self.changed or self.price > 0):
            return
        self.changed = False
        expiry = self._queues.expiry
        slack = max(0.0, expiry[0][0] - now) if expiry else 0.0
        self._next = now + min(REPLAN_MAX, max(REPLAN_SECONDS, REPLAN_SHARE * slack))
        if self._macro.typical is None:
            return
        replicas = len(self._macro.order)
        kept, dropped = keep_feasible(expiry, now, self._macro.promised(now), replicas)
        self.price = max((w.density for w in dropped), default=0.0)
        for w in kept:
            if w.place == DEFERRED:
                self._queues.put(w, MAIN)
        for w in dropped:
            if w.place == MAIN:
                self._queues.put(w, DEFERRED)


def keep_feasible(
    expiry: list[Item], now: float, busy: float, replicas: int
) -> tuple[list[Waiting], list[Waiting]]:
    """(kept, dropped) of the most urgent requests.

    ``expiry``: heap of all that wait, by latest start. ``busy``: replica seconds already promised.
    """
    if replicas < 1:
        return [], []
    heap: list[tuple[float, int, Waiting]] = []
    dropped: list[Waiting] = []
    work = busy
    for number, w in enumerate(_urgent(expiry)):
        heapq.heappush(heap, (w.density, number, w))
        work += w.cost
        # Its start lies before its own work; what is before it must be done by then.
        while work - w.cost > max(0.0, w.latest - now) * replicas and heap:
            least = heapq.heappop(heap)[2]
            work -= least.cost
            dropped.append(least)
            if least is w:
                break
    return [w for _, _, w in heap], dropped


def _urgent(heap: list[Item]) -> Iterator[Waiting]:
    """Up to PLANNED_MAX waiting requests in order of latest start, the heap left as it is."""
    if not heap:
        return
    candidates: list[tuple[float, int, int]] = [(heap[0][0], heap[0][2], 0)]
    found = 0
    for _ in range(2 * PLANNED_MAX):
        if not candidates or found >= PLANNED_MAX:
            return
        _, _, at = heapq.heappop(candidates)
        w = heap[at][3]
        if w.place == MAIN or w.place == DEFERRED:
            found += 1
            yield w
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(candidates, (heap[child][0], heap[child][2], child))
