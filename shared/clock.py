"""One time for all: Redis TIME, read through each process's own monotonic clock.

A process measures the offset from its monotonic clock to Redis TIME and keeps measuring; a
step of a host's wall clock moves no deadline. Durations come from monotonic clocks alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.asyncio import Redis

Now = Callable[[], float]


class RedisClock:
    """``clock()`` is Redis time in seconds. Starts at the wall clock until first synchronised."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._synchronised = False

    def __call__(self) -> float:
        return time.monotonic() + self._offset

    @property
    def offset(self) -> float:
        """Seconds to add to this host's monotonic clock (the same for all its processes)."""
        return self._offset

    async def synchronise(self, redis: Redis, probes: int = 3) -> float:
        """Measure the offset with the least round trip of ``probes``; returns that round trip.

        A later measurement only moves the offset by what its round trip cannot explain, so the
        clock does not jitter by network noise.
        """
        best: tuple[float, float] | None = None
        for _ in range(probes):
            before = time.monotonic()
            seconds, micros = await redis.time()
            after = time.monotonic()
            offset = seconds + micros / 1e6 - (before + after) / 2
            if best is None or after - before < best[0]:
                best = (after - before, offset)
        assert best is not None
        round_trip, offset = best
        if not self._synchronised or abs(offset - self._offset) > round_trip:
            self._offset = offset
            self._synchronised = True
        return round_trip
