"""Requests that a policy takes back from a replica (preemption), and what became of each.

A copy of the request is queued again before the replica is told to cancel it, so a crash loses
nothing; the copy waits here until the replica has said what happened. Not begun: it is queued.
Ended after all: the copy is dropped. Begun: its gateway is told it is lost, for only the gateway
knows what the client has seen, and sends it again as a continuation.
"""

from __future__ import annotations

from enum import Enum

from services.dispatcher.entries import Entry
from services.dispatcher.policies.base import Completion


class Outcome(Enum):
    """What is to be done with the copy."""

    QUEUE = "queue"
    DROP = "drop"
    LOST = "lost"


def outcome_of(completion: Completion) -> Outcome:
    if completion.reason in ("stop", "length", "failed"):
        return Outcome.DROP
    if completion.reason == "cancelled" and completion.output_tokens == 0:
        return Outcome.QUEUE
    return Outcome.LOST


class Recalls:
    """Keys that are being taken back. A copy and an outcome come in either order."""

    def __init__(self) -> None:
        self._open: dict[str, Entry | Outcome | None] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def begin(self, key: str) -> None:
        self._open.setdefault(key, None)

    def copy_came(self, entry: Entry) -> Outcome | None:
        """The copy was read; what to do with it, None: the replica has not spoken yet."""
        known = self._open.get(entry.key)
        if isinstance(known, Outcome):
            del self._open[entry.key]
            return known
        self._open[entry.key] = entry
        return None

    def ended(self, key: str, outcome: Outcome) -> Entry | None:
        """The replica has spoken; the copy if it was read already.

        Dropped it stays: what the replica says after its client has gone brings nobody back.
        """
        known = self._open.get(key)
        if known is Outcome.DROP:
            return None
        if isinstance(known, Entry):
            del self._open[key]
            return known
        self._open[key] = outcome
        return None
