"""Which waiting requests are released now, and in which order: the micro cycle.

By slack as long as all can make it; under overload, or when several tenants want more than there
is, by value, between tenants by the tokens they have had. Then what the plan gave up, then hopeless
ones. What fits no replica at present is passed over; one that has waited long enough gets a replica
kept free for it.
"""

from __future__ import annotations

import heapq

from services.dispatcher.policies.base import Action
from services.dispatcher.policies.parts.choice import Choice
from services.dispatcher.policies.parts.lane import INFINITY, Lane
from services.dispatcher.policies.parts.macro import Macro
from services.dispatcher.policies.parts.queues import LateItem, Queues
from services.dispatcher.policies.parts.round import Round
from services.dispatcher.policies.parts.share import TokenShares
from services.dispatcher.policies.parts.waiting import (
    APART,
    DEFERRED,
    GONE,
    LATE,
    MAIN,
    Item,
    Waiting,
)

LOOKS_MAX = 384  # replicas looked at in one decision; then readers get their turn
LOOK_AHEAD = 8  # requests tried beyond the first that fits nowhere now
LATE_AGE = 30.0  # a hopeless request this old gets a replica even under load
KEEP_AGE = 60.0  # one this old gets a replica kept free if it fits none as they are
KEEP_SECONDS = 2.0  # between two for which one is kept free: others have their limits


class Placement(Choice):
    """``where``: request -> its replica."""

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
        super().__init__(macro, safety=safety, lead=lead, fill=fill)
        self._queues, self._shares = queues, shares
        self.where: dict[str, Lane] = {}
        self._round = Round(0.0)
        self._kept: tuple[Waiting, Lane] | None = None  # a request and the replica kept for it
        self._keep_next = -INFINITY

    # ------------------------------------------------------------ one decision

    def open(self, now: float) -> bool:
        """See ``Choice``; the replica that is kept free may be the only one."""
        return super().open(now) or (self._kept is not None and self._opens(self._kept[1]))

    def serve(self, now: float, price: float, *, late: bool) -> list[Action]:
        """Release from all queues; with ``late`` the hopeless ones, too.

        ``price``, tokens a replica second: above 0 under overload.
        """
        self._round, self._overload, self._looks, self._held = Round(now), price > 0, 0, False
        queues = self._queues
        if self._kept is not None:
            self._serve_kept(*self._kept)
        if self._overload or self._contended():
            self._serve_valued()
        else:
            self._serve(queues.main, MAIN, "slack")
        self._serve(queues.deferred, DEFERRED, "left over, tokens per second")
        if queues.late_count:
            if late:
                self._serve_late()
            else:
                self.wake = now  # they are refused
        if self._looks >= LOOKS_MAX:
            self.wake = now
        return self._round.releases()

    def _contended(self) -> bool:
        """Several tenants have more waiting than the replicas take at once."""
        return self._shares.several and len(self._queues) > self._macro.room

    def _serve_valued(self) -> None:
        """By value; between tenants by the tokens they have had, whatever the plan gave up."""
        queues = self._queues
        why = "tokens per second, overload"
        valued = {t: heap for t, heap in queues.valued.items() if heap}
        given_up = {t: heap for t, heap in queues.given_up.items() if heap}
        tenants = valued.keys() | given_up.keys()
        if len(tenants) <= 1 or not self._shares.several:
            for heap in valued.values():
                self._serve(heap, MAIN, why)
            return
        line = [(self._shares.counter(tenant), tenant) for tenant in tenants]
        heapq.heapify(line)
        why = f"least served tenant, {why}"
        while line and self._lanes:
            _, tenant = heapq.heappop(line)
            if self._serve(valued.get(tenant, []), MAIN, why, most=1) or self._serve(
                given_up.get(tenant, []), DEFERRED, why, most=1
            ):
                heapq.heappush(line, (self._shares.counter(tenant), tenant))

    def _serve(self, queue: list[Item], place: int, order: str, most: int = LOOKS_MAX) -> int:
        """Release from the head of a queue while somebody fits somewhere; returns how many."""
        passed: list[Item] = []
        count, now = 0, self._now
        while queue and self._lanes and len(passed) <= LOOK_AHEAD and count < most:
            if self._looks >= LOOKS_MAX:
                break
            item = heapq.heappop(queue)
            w = item[3]
            if w.place != place:
                continue
            lane = self._choose(w)
            if lane is None:
                if not self._set_aside(w, now):
                    passed.append(item)
                continue
            why = order if item[1] > -INFINITY else "waited long"
            if passed:
                why = f"{why}, {len(passed)} before it fit nowhere now"
            self._release(w, lane, why)
            count += 1
        for item in passed:
            heapq.heappush(queue, item)
        return count

    def _set_aside(self, w: Waiting, now: float) -> bool:
        """It fits nowhere now. Whether it leaves its queue: no replica could do it even alone."""
        if w.kv > self._macro.reach.largest:
            self._queues.put(w, APART)
        elif w.bound and self._macro.hopeless(w, now):
            self._queues.put(w, LATE)
        else:
            self._held = True
            if w.latest < now:
                self._keep(w)
            return False
        return True

    def _release(self, w: Waiting, lane: Lane, why: str) -> None:
        now = self._now
        slack = w.latest - now
        end = lane.release(w, now, self._safety)
        self._macro.engaged(lane)
        self.where[w.request.id] = lane
        self._queues.remove(w)
        self._shares.leave(w.request.tenant)
        w.charged = self._shares.charge(w.request.tenant, w.request.prompt_tokens, w.output)
        self._round.add(lane, w, end, slack, why)
        self._close(lane)

    # ------------------------------------------------------------ hopeless requests

    def _serve_late(self) -> None:
        """Hopeless requests, oldest first, on the replicas that the load can spare.

        Between tenants by the tokens they have had.
        """
        queues, now = self._queues, self._now
        heads = queues.late_heads()
        spare = self._macro.spare()
        if spare < 1 and heads and now - min(heads.values())[1].arrived > LATE_AGE:
            spare = 1
        line = [(self._shares.counter(t), item[0], t) for t, item in heads.items()]
        heapq.heapify(line)
        passed: list[LateItem] = []
        while line and len(passed) <= LOOK_AHEAD and self._looks < LOOKS_MAX:
            lanes = self._for_late(spare)
            if not lanes:
                break
            tenant = heapq.heappop(line)[2]
            item = queues.next_late(tenant)
            if item is None:
                continue
            w = item[1]
            lane = self._choose_late(w, lanes)
            if lane is not None:
                w.late = True
                self._release(w, lane, "hopeless, after all others")
            elif w.kv > self._macro.reach.largest:
                queues.put(w, APART)
            else:
                passed.append(item)
                if now - w.arrived > KEEP_AGE:
                    self._keep(w)
            if rest := queues.late.get(tenant):
                heapq.heappush(line, (self._shares.counter(tenant), rest[0][0], tenant))
        queues.give_back(passed)

    # ------------------------------------------------------------ a replica kept free

    def _keep(self, w: Waiting) -> None:
        """Let nobody else onto a replica until there is room for this one: it has waited long."""
        if self._kept is not None or self._now < self._keep_next:
            return
        large = [lane for lane in self._macro.order if lane.size >= w.kv]
        if large:
            lane = min(large, key=_load)
            self._kept = (w, lane)
            if lane in self._lanes:
                self._lanes.remove(lane)

    def _serve_kept(self, w: Waiting, lane: Lane) -> None:
        """Release it if there is room by now."""
        if w.place in (GONE, APART) or lane not in self._macro.order:
            self._kept = None
            return
        if not self._opens(lane):
            if lane in self._lanes:
                self._lanes.remove(lane)
            return
        fits = lane.room(w.kv) and (
            not lane.flight
            or lane.slack >= lane.predict(w, self._now)[2] * (1 + self._safety) + self.epsilon
        )
        if fits:
            self._kept, self._keep_next = None, self._now + KEEP_SECONDS
            if w.place == LATE:
                w.late = True
            self._release(w, lane, "waited long, a replica was kept free")
        elif lane in self._lanes:
            self._lanes.remove(lane)


def _load(lane: Lane) -> tuple[int, int]:
    return len(lane.flight), lane.kv
