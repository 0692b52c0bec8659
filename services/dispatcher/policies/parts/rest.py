"""Training that gives way to load: when B = 0 is asked for, repeated, and taken back."""

from __future__ import annotations

from services.dispatcher.policies.base import Action, Suspend
from services.dispatcher.policies.parts.lane import INFINITY

RESUME_BELOW = 0.7  # of capacity: training may go on again
# So long without a late request, and it may, too, however high the load: bursts end, and between
# them training gives way by itself to every request that it would make late.
QUIET_SECONDS = 15.0
SUSPEND_AGAIN = 60.0  # seconds; the coordinator forgets a wish after two minutes


class Rest:
    """The wish that stands."""

    def __init__(self) -> None:
        self._suspended: tuple[str, ...] = ()
        self._asked = -INFINITY  # when that was asked for last
        self._late = -INFINITY  # when a request found no replica in time

    def ask(
        self, training: tuple[str, ...], *, late: bool, capacity: float, need: float, now: float
    ) -> list[Action]:
        """``training``: replicas that train; ``late``: some request found no replica in time.

        ``need`` and ``capacity``: requests a second that are expected and that all carry.
        """
        short = late and need > capacity
        if late:
            self._late = now
        known = set(training) <= set(self._suspended) and now - self._asked < SUSPEND_AGAIN
        if training and short and not known:
            self._suspended, self._asked = training, now
            return [Suspend(replicas=training, wanted=True)]
        quiet = now - self._late > QUIET_SECONDS
        if self._suspended and (quiet or need < RESUME_BELOW * capacity):
            suspended, self._suspended = self._suspended, ()
            return [Suspend(replicas=suspended, wanted=False)]
        return []
