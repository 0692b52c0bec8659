"""Requests that no serving replica could ever hold: they wait apart and hold up nobody."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from services.dispatcher.policies.base import Action, Promote, Request
from services.dispatcher.policies.fleet import Member, tokens


class Apart:
    """``largest``: tokens that the largest serving replica holds; infinite until one was seen."""

    def __init__(self) -> None:
        self.largest = math.inf
        self._requests: dict[str, Request] = {}
        self._heap: list[tuple[int, int, str]] = []  # tokens, order of entry, id; some are gone
        self._order = 0

    def __len__(self) -> int:
        return len(self._requests)

    def look(self, serving: Iterable[Member]) -> list[Request]:
        """Replicas serve now; returns requests that one of them could hold, in order of entry."""
        self.largest = max((m.size for m in serving), default=math.inf)
        back = []
        while (smallest := self._smallest()) is not None and tokens(smallest) <= self.largest:
            back.append((self._heap[0][1], self._requests.pop(smallest.id)))
        return [request for _, request in sorted(back, key=lambda entry: entry[0])]

    def takes(self, request: Request) -> bool:
        """Whether no serving replica could hold it; it waits here then."""
        if tokens(request) <= self.largest:
            return False
        self._requests[request.id] = request
        self._order += 1
        heapq.heappush(self._heap, (tokens(request), self._order, request.id))
        return True

    def drop(self, request_id: str) -> bool:
        """It was cancelled; False if it does not wait here."""
        return self._requests.pop(request_id, None) is not None

    def promotion(self, idle: Sequence[Member]) -> list[Action]:
        """An Idle replica that could hold one of them."""
        smallest = self._smallest()
        if smallest is None:
            return []
        fitting = [m for m in idle if m.fits(smallest)]
        why: dict[str, float | str] = {"holds_tokens": tokens(smallest)}
        return [Promote(replica=m.view.id, why=why) for m in fitting[:1]]

    def _smallest(self) -> Request | None:
        while self._heap:
            request = self._requests.get(self._heap[0][2])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None
