"""Split: the isolated design. ``serving`` replicas only serve, the others only train.

The comparison of section 10 of the CoLLM evaluation: equal hardware, requests never reach the
training part. Among its own replicas it is ``least_loaded``; one of them that went Idle is promoted
as there, one of the training part never is. ``collm up --policy split`` names those that train,
here and to the launcher.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.dispatcher.policies.fleet import Member
from services.dispatcher.policies.least_loaded import LeastLoaded


class Split(LeastLoaded):
    """``serving``: how many replicas (the first by id) serve; 0 means all but one.

    ``training``: ids of those that only train; where they are named, all others serve.
    """

    name = "split"

    def __init__(self, *, serving: int = 0, training: Sequence[str] = ()) -> None:
        super().__init__()
        if serving < 0:
            raise TypeError(f"serving: 0 or more replicas expected, {serving} given")
        self._serving, self._training = serving, frozenset(training)

    def members(self) -> list[Member]:
        """The replicas that serve."""
        if self._training:
            return [m for m in super().members() if m.view.id not in self._training]
        count = self._serving or max(1, len(self.fleet) - 1)
        return super().members()[:count]
