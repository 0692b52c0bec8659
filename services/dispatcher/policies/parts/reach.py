"""What a request could get of an empty replica: which limits it keeps, how many tokens it holds.

A request that no replica can serve in time even alone is hopeless now, however much slack it has
left; one that no replica can hold waits apart until one comes that can.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.dispatcher.policies.parts.lane import INFINITY, Lane
from services.dispatcher.policies.parts.waiting import Waiting

FRONT_MAX = 8  # replicas told apart; of more, the best of each number is taken for one

Point = tuple[float, float, float]  # seconds: a token alone, a prompt token, a step with a prompt


class Reach:
    """``largest``: tokens that the largest replica holds; infinite while there is none."""

    def __init__(self) -> None:
        self.largest = INFINITY
        self._front: list[Point] = []  # of replicas of which none is slower in everything

    def renew(self, lanes: Iterable[Lane]) -> None:
        """Look at all replicas anew."""
        largest = 0.0
        front: list[Point] = []
        for lane in lanes:
            largest = max(largest, lane.size)
            factor = lane.bias * lane.pace
            point = (
                (lane.alpha0 + lane.alpha1) * factor,
                lane.pi1 * factor,
                lane.pi0 * factor,
            )
            if any(_no_slower(other, point) for other in front):
                continue
            front = [other for other in front if not _no_slower(point, other)]
            front.append(point)
            if len(front) > FRONT_MAX:
                front = [
                    (min(p[0] for p in front), min(p[1] for p in front), min(p[2] for p in front))
                ]
        self.largest, self._front = largest or INFINITY, front

    def keeps(self, w: Waiting, now: float, ease: float = 0.0) -> bool:
        """Whether an empty replica would keep its limits; True while there is none.

        ``ease``: with that share of the time it takes to spare; below 0: though it takes that much
        less than predicted. A pace gets no better by waiting and is taken as predicted.
        """
        pace = w.request.tpot if w.output > 1 else None
        for token, prompt, chunk in self._front:
            first = now + prompt * w.prompt + chunk * w.chunks
            end = first + w.output * token
            if (pace is None or token <= pace) and w.met(first, end, ease * (end - now)):
                return True
        return not self._front


def _no_slower(one: Point, other: Point) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] and one[2] <= other[2]
