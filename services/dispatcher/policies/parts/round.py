"""The releases of one decision, gathered per replica, with the numbers behind each."""

from __future__ import annotations

from services.dispatcher.policies.base import Action, Release
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.waiting import Waiting


class Round:
    """``count`` requests have been released in this decision so far."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.count = 0
        self._batches: dict[str, list[tuple[Waiting, float, float, str]]] = {}

    def add(self, lane: Lane, w: Waiting, end: float, slack: float, why: str) -> None:
        """``end``: predicted; ``slack``: seconds it had left; ``why``: the order it came by."""
        self.count += 1
        self._batches.setdefault(lane.view.id, []).append((w, end, slack, why))

    def releases(self, lanes: dict[str, Lane]) -> list[Action]:
        return [
            Release(
                replica=replica,
                requests=tuple(w.request.id for w, _, _, _ in members),
                why=self._numbers(lanes[replica], members),
            )
            for replica, members in self._batches.items()
        ]

    def _numbers(
        self, lane: Lane, members: list[tuple[Waiting, float, float, str]]
    ) -> dict[str, float | str]:
        numbers: dict[str, float | str] = {
            "in_flight": len(lane.flight),
            "b_limit": lane.view.b_limit,
            "B": lane.B,
            "bias": round(lane.bias, 3),
            "order": members[0][3],
        }
        for w, end, slack, why in members:
            key = w.request.id
            numbers[f"predicted:{key}"] = round(end - self.now, 4)
            numbers[f"slack:{key}"] = round(slack, 4)
            numbers[f"waited:{key}"] = round(self.now - w.arrived, 4)
            numbers[f"order:{key}"] = why
        return numbers
