"""Ids that are kept for a while: the newest ones, so that memory stays bounded."""

from __future__ import annotations


class Remembered:
    """A set of at most ``most`` strings; the one that was added first goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, None] = {}

    def add(self, one: str) -> None:
        self._known.pop(one, None)
        self._known[one] = None
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def __contains__(self, one: str) -> bool:
        return one in self._known
