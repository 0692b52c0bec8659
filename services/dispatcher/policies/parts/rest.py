"""Training that gives way to load: when B = 0 is asked for, repeated, and taken back."""

from __future__ import annotations

from services.dispatcher.policies.base import Action, Suspend
from services.dispatcher.policies.parts.lane import INFINITY

RESUME_BELOW = 0.7  # of capacity: training may go on again
SUSPEND_AGAIN = 60.0  # seconds; the coordinator forgets a wish after two minutes


class Rest:
    """The wish that stands."""

    def __init__(self) -> None:
        self._suspended: tuple[str, ...] = ()
        self._asked = -INFINITY  # when that was asked for last

    def ask(
        self, training: tuple[str, ...], *, short: bool, capacity: float, need: float, now: float
    ) -> list[Action]:
        """``training``: replicas that train; ``short``: requests came too late because of them.

        ``need`` and ``capacity``: requests a second that are expected and that all carry.
        """
        known = set(training) <= set(self._suspended) and now - self._asked < SUSPEND_AGAIN
        if training and short and not known:
            self._suspended, self._asked = training, now
            return [Suspend(replicas=training, wanted=True)]
        if self._suspended and need < RESUME_BELOW * capacity:
            suspended, self._suspended = self._suspended, ()
            return [Suspend(replicas=suspended, wanted=False)]
        return []
