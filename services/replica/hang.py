"""When the inference process counts as hung, and when it is killed for it."""

from __future__ import annotations

import logging
import time

from services.replica.children import Child
from services.replica.control_block import ControlBlock
from shared.records import SILENCE

log = logging.getLogger(__name__)

KILL_STOPPED = 2 * SILENCE  # seconds after which a child that a signal has stopped is killed


class HangWatch:
    """Judges by the control blocks. Heartbeats stop at once, killing comes later.

    A child that a signal has stopped does not go on by itself; one that runs may only be short
    of processor time and gets as long as a step may take.
    """

    def __init__(self, child: Child, step_timeout: float) -> None:
        self._child, self._step_timeout = child, step_timeout
        self._patience = max(KILL_STOPPED, step_timeout)
        self._since: dict[str, float] = {}

    def why(self, block: ControlBlock) -> str | None:
        """Why the serving loop counts as hung; None while it makes progress."""
        return block.stuck(time.monotonic(), silence=SILENCE, step_timeout=self._step_timeout)

    def note(self, replica: str, why: str | None) -> None:
        """Called with every heartbeat, given or withheld."""
        if why is None:
            self._since.pop(replica, None)
            return
        now = time.monotonic()
        since = self._since.setdefault(replica, now)
        if since == now:
            log.error("%s: no heartbeat any more: %s", replica, why)
        elif now - since > (KILL_STOPPED if self._child.stopped else self._patience):
            log.error("%s: inference process is killed: %s", replica, why)
            self._since.pop(replica)
            self._child.kill()
