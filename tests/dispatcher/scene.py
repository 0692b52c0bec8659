"""Replicas and queues of the pacing policy, set up by hand."""

from __future__ import annotations

from services.dispatcher.policies.base import Release
from services.dispatcher.policies.parts.lane import Lane
from services.dispatcher.policies.parts.macro import Macro
from services.dispatcher.policies.parts.placement import (
    Placement,
)
from services.dispatcher.policies.parts.queues import Queues
from services.dispatcher.policies.parts.share import TokenShares
from services.dispatcher.policies.parts.waiting import MAIN, Waiting
from shared.latency import LatencyModel
from tests.dispatcher.made import request, view, where

# A request of 100 and 10 tokens alone: 0.2 s of prompt, 0.3 of answer; it delays others by 0.3.
MODEL = LatencyModel(alpha0=0.02, alpha1=0.01, pi0=0.1, pi1=0.001)


def lane(key: str, *, model: LatencyModel | None = MODEL, **more: object) -> Lane:
    made = Lane(view(key, **({"b_limit": 4} | more)))
    made.tell(made.view, model)
    return made


def occupy(lane: Lane) -> None:
    """One request decodes there; its prompt is through."""
    lane.release(Waiting(request("old"), 10.0, 0.5, 9.0, 0.0), 0.0)
    lane.prefill_end = 0.0


class Scene:
    """Replicas in order, all of them active unless said otherwise, and the queues."""

    def __init__(
        self,
        *lanes: Lane,
        active: int | None = None,
        safety: float = 0.0,
        lead: float = 0.02,
        fill: bool = True,
    ) -> None:
        self.macro, self.queues, self.shares = Macro(0.2), Queues(), TokenShares()
        self.macro.order = list(lanes)
        self.macro.active = len(lanes) if active is None else active
        self.macro.room = sum(each.view.b_limit for each in lanes)
        for rank, each in enumerate(lanes):
            each.rank = rank
        self.placement = Placement(
            self.macro, self.queues, self.shares, safety=safety, lead=lead, fill=fill
        )

    def wait(
        self, key: str = "q", place: int = MAIN, *, output: float = 10.0, cost: float = 0.5,
        latest: float = 9.0, arrived: float = 0.0, bounds: tuple[float, float] | None = None,
        **more: object,
    ) -> Waiting:  # fmt: skip
        w = Waiting(request(key, **more), output, cost, latest, arrived, bounds)
        self.queues.enter(w, place)
        self.shares.enter(w.request.tenant)
        return w

    def serve(
        self, now: float = 0.0, price: float = 0.0, *, late: bool = True
    ) -> dict[str, tuple[str, ...]]:
        """Requests by replica that go out at this moment."""
        return where(self.releases(now, price, late=late))

    def releases(self, now: float = 0.0, price: float = 0.0, *, late: bool = True) -> list[Release]:
        self.queues.expire(now)
        if not self.placement.open(now):
            return []
        found = self.placement.serve(now, price, late=late)
        return [each for each in found if isinstance(each, Release)]


def why(release: Release, key: str = "q") -> object:
    return release.why[f"order:{key}"]
