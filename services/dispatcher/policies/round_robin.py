"""Round robin: requests in order of arrival to the replicas in turn.

A replica at its concurrency limit is skipped, so nothing queues where it cannot be taken back.
"""

from __future__ import annotations

from services.dispatcher.policies.base import Request
from services.dispatcher.policies.fcfs import FirstCome
from services.dispatcher.policies.fleet import Member


class RoundRobin(FirstCome):
    name = "round_robin"

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def choose(self, request: Request, candidates: list[Member]) -> Member:
        chosen = next((m for m in candidates if m.view.id > self._last), candidates[0])
        self._last = chosen.view.id
        return chosen
