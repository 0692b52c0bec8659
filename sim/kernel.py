"""The heap of the simulation: time, and what happens next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, Any], None]  # (world, argument)


class Kernel:
    """One heap of events. Events of one moment happen in the order they were pushed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self.stopped = False  # nothing more that matters will happen
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._order = 0

    def push(self, time: float, handler: Handler, argument: Any) -> None:
        """``handler(world, argument)`` at ``time`` (not before now)."""
        self._order += 1
        now = self.now
        heapq.heappush(self._heap, (time if time > now else now, self._order, handler, argument))

    def run(self, world: Any, most: int) -> None:
        """Handle events in order of time: at most ``most``, until ``stopped`` or none is left."""
        heap, pop = self._heap, heapq.heappop
        for _ in range(most):
            if not heap or self.stopped:
                return
            self.now, _, handler, argument = pop(heap)
            self.handled += 1
            handler(world, argument)

    def __len__(self) -> int:
        return len(self._heap)
