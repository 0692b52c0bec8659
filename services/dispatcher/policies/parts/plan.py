"""Which of the waiting requests can all make it, and which are the ones to give up first.

Moore and Hodgson's rule for one machine, weighted, with the active replicas taken as one machine
that many times as fast: go through the requests in order of their latest start; whenever the work
so far does not fit, give up the request with fewest tokens per second of replica time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.dispatcher.policies.parts.waiting import DEFERRED, MAIN, Item, Waiting

PLANNED_MAX = 256  # requests looked at: those with the least slack


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
