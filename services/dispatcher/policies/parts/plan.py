"""Which of the waiting requests can all make it, and which are the ones to give up first.

Moore and Hodgson's rule for one machine, weighted, with the active replicas taken as one machine
that many times as fast: go through the requests in order of their latest start; whenever the work
so far does not fit, give up the request with fewest tokens per second of replica time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from services.dispatcher.policies.parts.waiting import Waiting

PLANNED_MAX = 256  # requests looked at: those with the least slack


def keep_feasible(
    main: Iterable[Waiting],
    deferred: Iterable[Waiting],
    now: float,
    busy: float,
    replicas: int,
) -> tuple[list[Waiting], list[Waiting]]:
    """(kept, dropped) of the most urgent requests. ``busy``: replica seconds already promised."""
    urgent = heapq.nsmallest(PLANNED_MAX, [*main, *deferred], key=_latest)
    if replicas < 1:
        return urgent, []
    heap: list[tuple[float, int, Waiting]] = []
    dropped: list[Waiting] = []
    work = busy
    for number, w in enumerate(urgent):
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


def _latest(w: Waiting) -> float:
    return w.latest
