"""The releases of one decision, gathered per replica, with the numbers behind each."""

from __future__ import annotations

from services.dispatcher.policies.base import Action, Release
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.waiting import Waiting

Member = tuple[Waiting, float, float, str]  # request, predicted end, slack left, its order


class Round:
    """What has been released in this decision so far."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._batches: dict[Lane, list[Member]] = {}

    def add(self, lane: Lane, w: Waiting, end: float, slack: float, why: str) -> None:
        """``end``: predicted; ``slack``: seconds it had left; ``why``: the order it came by."""
        self._batches.setdefault(lane, []).append((w, end, slack, why))

    def releases(self) -> list[Action]:
        return [
            Release(
                replica=lane.view.id,
                requests=tuple(w.request.id for w, _, _, _ in members),
                why=self._numbers(lane, members),
            )
            for lane, members in self._batches.items()
        ]

    def _numbers(self, lane: Lane, members: list[Member]) -> dict[str, float | str]:
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
            numbers[f"underway:{key}"] = round(w.arrived - w.request.arrival, 4)
            numbers[f"waited:{key}"] = round(self.now - w.arrived, 4)
            numbers[f"order:{key}"] = why
        return numbers
