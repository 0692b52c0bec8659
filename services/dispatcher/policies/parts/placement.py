"""Which waiting request goes to which replica now: the micro cycle's releases.

A request goes where it makes its own limits and breaks those of nobody in flight: to the first
replica in the macro cycle's order where both hold with room to spare (``EASE``), so that batches
fill the latency budget on the first replicas and the last ones have only the peaks; if there is
none, where it is done at the least expense: its time there and the delay it brings to the others,
over the replica's quality. A replica takes part as soon as it can begin with another prompt within
``lead`` seconds; what is kept waiting until then is held on purpose, so that the choice stays open.
"""

from __future__ import annotations

import heapq

from services.dispatcher.policies.base import Action
from services.dispatcher.policies.parts.lane import INFINITY, Lane
from services.dispatcher.policies.parts.macro import Macro
from services.dispatcher.policies.parts.queues import Queues
from services.dispatcher.policies.parts.round import Round
from services.dispatcher.policies.parts.share import TokenShares
from services.dispatcher.policies.parts.waiting import DEFERRED, MAIN, Item, Waiting

LANES_TRIED = 16  # open replicas considered in one decision
LOOKS_MAX = 384  # replicas looked at in one decision; then readers get their turn
LOOK_AHEAD = 8  # requests tried beyond the first that fits nowhere now
EASE = 0.2  # share of a predicted time that is left over where batches are filled
OUTSIDE_SHARE = 0.1  # of its time left that a request must save to leave the active set
OUTSIDE = 10.0  # the same for one without a deadline, seconds
LATE_AGE = 30.0  # a hopeless request this old gets a replica even under load
LATE_PER_LANE = 2  # hopeless requests together on one replica, unless the cluster is at rest


class Placement:
    """``where``: request -> its replica. ``wake``: when a replica can begin with another one.

    ``fill``: the first replicas first, see the module; otherwise always the least expense.
    """

    def __init__(
        self,
        macro: Macro,
        queues: Queues,
        shares: TokenShares,
        *,
        safety: float,
        lead: float,
        fill: bool = True,
    ) -> None:
        self._macro, self._queues, self._shares = macro, queues, shares
        self._safety, self._lead, self._fill = safety, lead, fill
        self.epsilon = 0.0  # control overhead to leave for, measured
        self.where: dict[str, Lane] = {}
        self.wake = INFINITY
        self._overload = False
        self._lanes: list[Lane] = []
        self._round = Round(0.0)
        self._looks = 0

    # ------------------------------------------------------------ one decision

    def open(self, now: float) -> bool:
        """Gather the replicas that can begin with another request soon; is there any?

        Of many replicas only some are looked at, others the next time (power of d choices).
        """
        soon, wake = now + self._lead, INFINITY
        closed = self.epsilon + self._macro.least_delay
        self._lanes = lanes = []
        for lane in self._macro.candidates(LANES_TRIED):
            if len(lane.flight) >= lane.view.b_limit:
                continue
            if lane.prefill_end > soon:
                if lane.prefill_end < wake:
                    wake = lane.prefill_end
                continue
            if lane.slack <= closed:
                lane.renew(now)
            if lane.slack > closed:
                lanes.append(lane)
                if len(lanes) >= LANES_TRIED:
                    break
        self.wake = wake - self._lead
        return bool(lanes)

    def serve(self, now: float, price: float, *, late: bool) -> list[Action]:
        """Release from all queues, ``late``: the hopeless ones, too.

        Under overload (``price`` above 0, or several tenants that want more than there is) by
        value, else by slack.
        """
        self._round, self._overload, self._looks = Round(now), price > 0, 0
        queues = self._queues
        if self._overload or self._contended():
            self._serve_valued()
        else:
            self._serve(queues.main, MAIN, "slack")
        self._serve(queues.deferred, DEFERRED, "left over, tokens per second")
        if late and queues.late_count:
            self._serve_late()
        if self._looks >= LOOKS_MAX:
            self.wake = now
        return self._round.releases()

    def _contended(self) -> bool:
        """Several tenants have more waiting than the replicas take at once."""
        return self._shares.several and len(self._queues) > self._macro.room

    def _serve_valued(self) -> None:
        """By value; between tenants by the tokens they have had."""
        queues, now = self._queues, self._round.now
        while queues.overdue(now):
            if not self._serve(queues.main, MAIN, "waited long", most=1):
                break
        tenants = {t: heap for t, heap in queues.valued.items() if heap}
        why = "tokens per second, overload"
        if len(tenants) == 1:
            self._serve(next(iter(tenants.values())), MAIN, why)
            return
        line = [(self._shares.counter(tenant), tenant) for tenant in tenants]
        heapq.heapify(line)
        while line:
            _, tenant = heapq.heappop(line)
            if self._serve(tenants[tenant], MAIN, f"least served tenant, {why}", most=1):
                heapq.heappush(line, (self._shares.counter(tenant), tenant))

    def _serve(self, queue: list[Item], place: int, order: str, most: int = LOOKS_MAX) -> int:
        """Release from the head of a queue while somebody fits somewhere; returns how many."""
        passed: list[Item] = []
        count = 0
        while queue and self._lanes and len(passed) <= LOOK_AHEAD and count < most:
            if self._looks >= LOOKS_MAX:
                break
            item = heapq.heappop(queue)
            w = item[3]
            if w.place != place:
                continue
            lane = self._choose(w)
            if lane is None:
                passed.append(item)
                continue
            why = order if not passed else f"{order}, {len(passed)} before it fit nowhere now"
            self._release(w, lane, why)
            count += 1
        for item in passed:
            heapq.heappush(queue, item)
        return count

    def _choose(self, w: Waiting) -> Lane | None:
        """The replica where it and everybody there keep their limits; None: nowhere now."""
        best, least, now = None, INFINITY, self._round.now
        epsilon, safety, active = self.epsilon, self._safety, self._macro.active
        overload, lanes = self._overload, self._lanes
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

    def _easy(self, w: Waiting, lane: Lane, first: float, end: float, delay: float) -> bool:
        """Whether all limits would be kept there with room to spare, however long the answer."""
        adapter = w.request.adapter
        if lane.latency is None or not (adapter is None or adapter in lane.view.adapters):
            return False
        if lane.flight and delay * (1 + EASE) + self.epsilon > lane.slack:
            return False
        margin = self.epsilon + EASE * (end - self._round.now)
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
            score += OUTSIDE_SHARE * (due - self._round.now) if bound else OUTSIDE
        if adapter is not None and adapter not in lane.view.adapters:
            score += 1.0
        return score

    def _release(self, w: Waiting, lane: Lane, why: str) -> None:
        now = self._round.now
        slack = w.latest - now
        end = lane.release(w, now, self._safety)
        self._macro.engaged(lane)
        self.where[w.request.id] = lane
        self._queues.remove(w)
        self._shares.leave(w.request.tenant)
        self._shares.charge(w.request.tenant, w.request.prompt_tokens, w.output)
        self._round.add(lane, w, end, slack, why)
        if len(lane.flight) >= lane.view.b_limit:
            self._lanes.remove(lane)
        elif lane.prefill_end > now + self._lead:
            self._lanes.remove(lane)
            self.wake = min(self.wake, lane.prefill_end - self._lead)

    # ------------------------------------------------------------ hopeless requests

    def _serve_late(self) -> None:
        """Hopeless requests, oldest first, on the replicas that the load can spare."""
        queues, now = self._queues, self._round.now
        oldest = queues.oldest_late()
        spare = self._macro.spare()
        if spare < 1 and oldest is not None and now - oldest.arrived > LATE_AGE:
            spare = 1
        while self._lanes and (w := queues.oldest_late()) is not None:
            if self._looks >= LOOKS_MAX:
                return
            lane = self._late_lane(w, spare)
            if lane is None:
                return
            w.late = True
            self._release(w, lane, "hopeless, after all others")

    def _late_lane(self, w: Waiting, spare: int) -> Lane | None:
        best, least = None, INFINITY
        used, rest = self._macro.background, self._macro.at_rest()
        self._looks += len(self._lanes)
        for lane in self._lanes:
            if (lane not in used and len(used) >= spare) or lane.background >= _late_limit(
                lane, rest
            ):
                continue
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
