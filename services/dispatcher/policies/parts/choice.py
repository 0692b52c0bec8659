"""To which replica a waiting request can go now.

It goes where it makes its own limits and breaks those of nobody in flight: to the first replica in
the macro cycle's order where both hold with room to spare (``EASE``), so that batches fill the
latency budget on the first replicas and the last ones have only the peaks; if there is none, where
it is done at the least expense: its time there and the delay it brings to the others, over the
replica's quality. A replica takes part as soon as it can begin with another prompt within ``lead``
seconds; what is kept waiting until then is held on purpose, so that the choice stays open.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.dispatcher.policies.parts.lane import INFINITY, Lane
from services.dispatcher.policies.parts.macro import Macro
from services.dispatcher.policies.parts.waiting import Waiting

LANES_TRIED = 16  # open replicas considered in one decision
OUTSIDE_TRIED = 4  # of them outside the active set, where a request found no room inside
HOLDERS_TRIED = 4  # replicas that hold the adapter, besides those, where there are more
EASE = 0.2  # share of a predicted time that is left over where batches are filled
OUTSIDE_SHARE = 0.1  # of its time left that a request must save to leave the active set
OUTSIDE = 10.0  # the same for one without a deadline, seconds
LATE_PER_LANE = 2  # hopeless requests together on one replica, unless the cluster is at rest


class Choice:
    """``wake``: when a replica can begin with another request; ``epsilon``: seconds.

    ``fill``: the first replicas first, see the module; otherwise always the least expense.
    """

    def __init__(self, macro: Macro, *, safety: float, lead: float, fill: bool) -> None:
        self._macro = macro
        self._safety, self._lead, self._fill = safety, lead, fill
        self.epsilon = 0.0  # control overhead to leave for, measured
        self.wake = INFINITY
        self._overload = False
        self._now = 0.0
        self._lanes: list[Lane] = []
        self._looks = 0
        self._held = False  # a request found no room the last time

    # ------------------------------------------------------------ who takes part

    def open(self, now: float) -> bool:
        """Gather the replicas that can begin with another request soon; is there any?

        Of many replicas only some are looked at, others the next time (power of d choices). Those
        outside the active set are where all inside are looked at, none of them is open, or a
        request found no room inside the last time.
        """
        self._now, self.wake, self._lanes = now, INFINITY, []
        order, line = self._macro.order, self._macro.line
        if len(order) <= LANES_TRIED:
            self._gather(order)
        else:
            inside, all_of_them = line.inside(LANES_TRIED - OUTSIDE_TRIED * self._held)
            self._gather(inside)
            if all_of_them or self._held or not self._lanes:
                self._gather(line.outside(LANES_TRIED - len(self._lanes)))
        self.wake -= self._lead
        return bool(self._lanes)

    def _gather(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            if self._opens(lane):
                self._lanes.append(lane)
                if len(self._lanes) >= LANES_TRIED:
                    return

    def _opens(self, lane: Lane) -> bool:
        now = self._now
        if len(lane.flight) >= lane.view.b_limit:
            return False
        if lane.prefill_end > now + self._lead:
            if lane.prefill_end < self.wake:
                self.wake = lane.prefill_end
            return False
        closed = self.epsilon + self._macro.least_delay
        if lane.slack <= closed:
            lane.renew(now)
        return lane.slack > closed

    def _close(self, lane: Lane) -> None:
        """A request went there: it takes another one now only if it can begin with it soon."""
        if lane not in self._lanes:
            return
        if len(lane.flight) >= lane.view.b_limit:
            self._lanes.remove(lane)
        elif lane.prefill_end > self._now + self._lead:
            self._lanes.remove(lane)
            self.wake = min(self.wake, lane.prefill_end - self._lead)

    # ------------------------------------------------------------ which one

    def _choose(self, w: Waiting) -> Lane | None:
        """The replica where it and everybody there keep their limits; None: nowhere now."""
        best, least, now = None, INFINITY, self._now
        epsilon, safety, active = self.epsilon, self._safety, self._macro.active
        overload, lanes = self._overload, self._lanes
        if w.request.adapter is not None and len(self._macro.order) > LANES_TRIED:
            lanes = self._with_holders(w.request.adapter)
        bound, need, plain, due = w.bound, w.kv, w.plain, w.due
        fill = self._fill and bound
        self._looks += len(lanes)
        for lane in lanes:  # in order of Q times rate
            if lane.kv + need > lane.kv_total or need > lane.context:
                continue
            first, end, delay = lane.predict(w, now)
            flight = len(lane.flight)
            if bound:
                # An empty replica may try what is tight: nobody is hurt by it.
                margin = epsilon + safety * (end - now) if flight or overload else 0.0
                if end + margin > due if plain else not w.met(first, end, margin):
                    continue
            if flight and delay * (1 + safety) + epsilon > lane.slack:
                continue
            if fill and lane.rank < active and self._easy(w, lane, first, end, delay):
                return lane
            score = (end - now + delay * flight) / lane.quality
            if score < least:
                score = self._expense(w, lane, score)
                if score < least:
                    best, least = lane, score
        return best

    def _with_holders(self, adapter: str) -> list[Lane]:
        """The open replicas, and others that hold the adapter if none of those does."""
        lanes = self._lanes
        if any(adapter in lane.view.adapters for lane in lanes):
            return lanes
        holders = self._macro.line.holders(adapter, HOLDERS_TRIED)
        return [lane for lane in holders if self._opens(lane)] + lanes

    def _easy(self, w: Waiting, lane: Lane, first: float, end: float, delay: float) -> bool:
        """Whether all limits would be kept there with room to spare, however long the answer."""
        adapter = w.request.adapter
        if lane.latency is None or not (adapter is None or adapter in lane.view.adapters):
            return False
        if lane.flight and delay * (1 + EASE) + self.epsilon > lane.slack:
            return False
        margin = self.epsilon + EASE * (end - self._now)
        return end + w.stretch * (end - first) + margin <= w.due and (
            w.plain or w.met(first, end, margin)
        )

    def _expense(self, w: Waiting, lane: Lane, score: float) -> float:
        """``score``, seconds, with what speaks against this replica besides."""
        adapter, due = w.request.adapter, w.due
        if lane.latency is None:
            score = len(lane.flight) / lane.view.b_limit
        if lane.rank >= self._macro.active:  # only if it saves much or nobody inside can do it
            bound = w.bound and due < INFINITY
            score += OUTSIDE_SHARE * (due - self._now) if bound else OUTSIDE
        if adapter is not None and adapter not in lane.view.adapters:
            score += 1.0
        return score

    # ------------------------------------------------------------ hopeless requests

    def _for_late(self, spare: int) -> list[Lane]:
        """Open replicas that may take another hopeless request; ``spare`` of all have some."""
        used, rest = self._macro.background, self._macro.at_rest()
        return [
            lane
            for lane in self._lanes
            if (lane in used or len(used) < spare) and lane.background < _late_limit(lane, rest)
        ]

    def _choose_late(self, w: Waiting, lanes: list[Lane]) -> Lane | None:
        """The one with fewest in flight among those where it fits and makes nobody late."""
        best, least = None, INFINITY
        self._looks += len(lanes)
        for lane in lanes:
            if not lane.room(w.kv) or lane.slack < lane.predict(w, 0.0)[2] + self.epsilon:
                continue
            if len(lane.flight) < least:
                best, least = lane, len(lane.flight)
        return best


def _late_limit(lane: Lane, rest: bool) -> int:
    """Hopeless requests together on a replica.

    At rest so many that an iteration takes twice as long as that of one, and half of its places: a
    burst's leftovers are then done soon, and who comes next still finds room and little delay.
    """
    if not rest:
        return LATE_PER_LANE
    half = lane.view.b_limit // 2
    knee = half if lane.alpha1 <= 0 else int((lane.alpha0 + lane.alpha1) / lane.alpha1)
    return max(LATE_PER_LANE, min(half, knee))
