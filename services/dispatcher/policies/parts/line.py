"""Replicas in turn: of many, a decision looks at some, the next one at others.

Those of the active set come first; the others only where none of those is open, so that they have
nothing to do and can train. Full ones leave the line until they are freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from services.dispatcher.policies.parts.lane import Lane

Books = dict[Lane, None]


class Line:
    """Dispatchable replicas with credit, as far as is known, and which adapters they hold."""

    def __init__(self) -> None:
        self._inside: Books = {}
        self._outside: Books = {}
        self._holders: dict[str, Books] = {}
        self._held: dict[Lane, Mapping[str, str]] = {}

    def renew(self, order: Sequence[Lane], active: int) -> None:
        """The macro cycle has put them in order."""
        self._inside = dict.fromkeys(order[:active])
        self._outside = dict.fromkeys(order[active:])

    def told(self, lane: Lane) -> None:
        """Its record has changed: it may hold other adapters."""
        new: Mapping[str, str] = lane.view.adapters if lane.view.dispatchable else {}
        old = self._held.get(lane, {})
        if new.keys() == old.keys():
            return
        for adapter in old.keys() - new.keys():
            holders = self._holders[adapter]
            holders.pop(lane, None)
            if not holders:
                del self._holders[adapter]
        for adapter in new.keys() - old.keys():
            self._holders.setdefault(adapter, {})[lane] = None
        self._held[lane] = new
        if not new:
            del self._held[lane]

    def gone(self, lane: Lane) -> None:
        self._inside.pop(lane, None)
        self._outside.pop(lane, None)
        for adapter in self._held.pop(lane, {}):
            holders = self._holders[adapter]
            holders.pop(lane, None)
            if not holders:
                del self._holders[adapter]

    def freed(self, lane: Lane, *, inside: bool) -> None:
        """It has credit again."""
        (self._inside if inside else self._outside)[lane] = None

    # ------------------------------------------------------------ whose turn it is

    def inside(self, few: int) -> tuple[list[Lane], bool]:
        """So many of the active set, in order; whether these are all of it that have credit."""
        chosen = _turn(self._inside, few)
        return chosen, len(chosen) == len(self._inside)

    def outside(self, few: int) -> list[Lane]:
        return _turn(self._outside, few)

    def holders(self, adapter: str, few: int) -> list[Lane]:
        """Some that hold the adapter and have credit."""
        books = self._holders.get(adapter, {})
        found = [x for x in islice(books, 4 * few) if len(x.flight) < x.view.b_limit][:few]
        for lane in found:
            del books[lane]
            books[lane] = None
        return found


def _turn(books: Books, few: int) -> list[Lane]:
    """The next ``few`` with credit, in order of rank; they go to the end, full ones go out."""
    chosen: list[Lane] = []
    full: list[Lane] = []
    for lane in islice(books, 4 * few):
        if len(chosen) == few:
            break
        (chosen if len(lane.flight) < lane.view.b_limit else full).append(lane)
    for lane in full:
        del books[lane]
    for lane in chosen:
        del books[lane]
        books[lane] = None
    chosen.sort(key=_rank)
    return chosen


def _rank(lane: Lane) -> int:
    return lane.rank
