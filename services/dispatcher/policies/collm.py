"""The pacing policy: paced subflows that fill each replica's latency budget, quality-aware.

Source: the dispatcher's macro and micro cycles of CoLLM (arXiv 2604.16400), completed here. Each
queued request has a slack: the time until it must start to make its deadlines. Requests go out in
order of slack (EDF), each to a replica where it makes its own limits and breaks those of nobody
in flight, and no earlier than the replica's prompts before it are nearly done: late binding
leaves the choice open while nothing is lost by it. Under overload EDF alone serves everybody
late; so every few milliseconds a plan over the queue keeps the requests that can all make it and
drops those with fewest tokens per second of replica time first (Moore-Hodgson's rule, weighted).
Dropped ones run where room is left while they can still make it; hopeless ones last, on no more
replicas than the load can spare (or they are refused: ``on_overload: shed``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from services.dispatcher.policies.base import (
    Action,
    Completion,
    ReplicaView,
    Request,
    Shed,
    StepSeen,
)
from services.dispatcher.policies.parts.fit import StepFit
from services.dispatcher.policies.parts.lane import INFINITY, Lane
from services.dispatcher.policies.parts.lengths import Lengths
from services.dispatcher.policies.parts.macro import Macro
from services.dispatcher.policies.parts.plan import keep_feasible
from services.dispatcher.policies.parts.queues import Queues
from services.dispatcher.policies.parts.round import Round
from services.dispatcher.policies.parts.share import TokenShares
from services.dispatcher.policies.parts.waiting import DEFERRED, GONE, LATE, MAIN, Item, Waiting

LEAD_SECONDS = 0.02  # a release goes out this long before the replica can begin with it
REPLAN_SECONDS = 0.01
REPLAN_SHARE = 0.02  # of the slack of the requests planned: how long a plan holds
REPLAN_MAX = 0.5
LANES_TRIED = 16  # open replicas considered in one decision
RELEASES_MAX = 64  # in one decision; then readers get their turn before the next one
LOOK_AHEAD = 8  # requests tried beyond the first that fits nowhere now
OUTSIDE_SHARE = 0.1  # of its time left that a request must save to leave the active set
OUTSIDE = 10.0  # the same for one without a deadline, seconds
FCFS_HORIZON = 60.0  # a request without a SLO has the slack of one due after this long
LATE_AGE = 30.0  # a hopeless request this old gets a replica even under load
LATE_PER_LANE = 2  # hopeless requests together on one replica


class Collm:
    """See the module. Times in seconds.

    ``epsilon``: control overhead between decision and engine; ``safety``: share of a predicted
    time added to it; ``headroom``: capacity kept free (h); ``on_overload``: best_effort | shed.
    """

    name = "collm"

    def __init__(
        self,
        *,
        on_overload: str = "best_effort",
        headroom: float = 0.2,
        epsilon: float = 0.004,
        safety: float = 0.03,
        prior_output: float = 128.0,
        output_quantile: float = 0.8,
        lead: float = LEAD_SECONDS,
    ) -> None:
        if on_overload not in ("best_effort", "shed"):
            raise TypeError(f"on_overload: best_effort or shed expected, {on_overload!r} given")
        self._shed = on_overload == "shed"
        self._epsilon, self._safety, self._lead = epsilon, safety, lead
        self.lengths = Lengths(prior_output, output_quantile)
        self.fit = StepFit()
        self.shares = TokenShares()
        self.lanes: dict[str, Lane] = {}
        self._where: dict[str, Lane] = {}
        self._queues = Queues()
        self._price = 0.0  # tokens a replica second below which a request is deferred
        self._plan_next = -INFINITY
        self._changed = False
        self._wake = INFINITY
        self.macro = Macro(headroom)

    # ------------------------------------------------------------ events

    def on_arrival(self, request: Request, now: float) -> None:
        output = self.lengths.expect(request)
        typical = self.macro.typical
        cost, latest = 0.0, INFINITY
        prefill, alone = 0.0, 0.0
        if typical is not None:
            prefill = typical.t_prefill(request.prompt_tokens)
            alone = prefill + output * (typical.alpha0 + typical.alpha1)
            cost = prefill + output * self.macro.token_seconds
        if request.deadline is not None:
            latest = request.deadline - alone
        if request.ttft_deadline is not None:
            latest = min(latest, request.ttft_deadline - prefill)
        if latest == INFINITY:
            latest = request.arrival + FCFS_HORIZON
        w = Waiting(request, output, cost, latest, now)
        self.shares.enter(request.tenant)
        self.macro.arrived(w, hopeless=latest < now)
        if w.bound and latest < now:
            self._queues.enter(w, LATE)
        else:
            self._queues.enter(w, DEFERRED if w.density < self._price else MAIN)
        self._changed = True

    def on_cancel(self, request_id: str, now: float) -> bool:
        w = self._queues.waiting.get(request_id)
        if w is None:
            return False
        self._remove(w)
        return True

    def on_replica(self, replica: ReplicaView, now: float) -> None:
        lane = self.lanes.get(replica.id)
        if lane is None:
            lane = self.lanes[replica.id] = Lane(replica)
        lane.tell(replica, replica.latency or self.fit.model(replica.id))
        self.macro.replicas_changed = True

    def on_replica_gone(self, replica_id: str, now: float) -> None:
        lane = self.lanes.pop(replica_id, None)
        self.fit.forget(replica_id)
        if lane is not None:
            for key in lane.flight:
                self._where.pop(key, None)
        self.macro.replicas_changed = True

    def on_completion(self, completion: Completion, now: float) -> None:
        lane = self._where.get(completion.id)
        if lane is None or lane.view.id != completion.replica:
            return
        del self._where[completion.id]
        ended = completion.reason in ("stop", "length") and completion.output_tokens > 0
        running = lane.leave(completion.id, now, learn=ended)
        self.macro.freed(lane)
        if running is not None and ended:
            self.lengths.learn(running.waiting.request, completion)

    def on_step(self, step: StepSeen, now: float) -> None:
        self.fit.learn(step)
        self.macro.saw(step)

    def restore(self, replica_id: str, requests: Sequence[Request], now: float) -> None:
        lane = self.lanes.get(replica_id)
        if lane is None:
            return
        for request in requests:
            w = Waiting(request, self.lengths.expect(request), 0.0, INFINITY, now)
            w.place = GONE
            lane.release(w, now)
            self._where[request.id] = lane

    def queued(self) -> int:
        return len(self._queues)

    # ------------------------------------------------------------ decision

    def decide(self, now: float) -> list[Action]:
        actions: list[Action] = self.macro.cycle(self, now)
        self._wake = INFINITY
        queues = self._queues
        if not queues.waiting:
            return actions
        self.macro.expired(queues.expire(now))
        queues.compact()
        if self._shed and queues.late_count and self.lengths.known:
            actions += self._refuse(now)
        lanes = self._open_lanes(now)
        if lanes:
            self._replan(now)
            round_ = Round(now)
            if self._price > 0 or self._contended():
                self._serve_valued(lanes, round_)
            else:
                self._serve(queues.main, MAIN, lanes, round_, "slack")
            self._serve(queues.deferred, DEFERRED, lanes, round_, "left over, tokens per second")
            if queues.late_count and not self._shed:
                self._serve_late(lanes, round_)
            actions += round_.releases(self.lanes)
        if queues.waiting:
            actions += self.macro.promote(self, now)
        return actions

    def next_wake(self, now: float) -> float | None:
        wake = self.macro.next_cycle
        if self._queues.waiting:
            wake = min(wake, self._wake)
            if self._queues.expiry:
                wake = min(wake, self._queues.expiry[0][0] + 1e-4)
        return max(wake, now)

    def _open_lanes(self, now: float) -> list[Lane]:
        """Replicas that can begin with another request soon, in the macro cycle's order.

        Of many replicas only some are looked at, others the next time (power of d choices).
        """
        soon, wake = now + self._lead, INFINITY
        closed = self._epsilon + self.macro.least_delay
        lanes: list[Lane] = []
        for lane in self.macro.candidates(LANES_TRIED):
            if len(lane.flight) >= lane.view.b_limit:
                continue
            if lane.prefill_end > soon:
                if lane.prefill_end < wake:
                    wake = lane.prefill_end
            elif lane.slack() > closed:
                lanes.append(lane)
                if len(lanes) >= LANES_TRIED:
                    break
        self._wake = wake - self._lead
        return lanes

    def _replan(self, now: float) -> None:
        """Set the price and move requests between main and deferred accordingly."""
        if not self._changed or now < self._plan_next:
            return
        self._changed = False
        expiry = self._queues.expiry
        slack = max(0.0, expiry[0][0] - now) if expiry else 0.0
        self._plan_next = now + min(REPLAN_MAX, max(REPLAN_SECONDS, REPLAN_SHARE * slack))
        if self.macro.typical is None:
            return
        busy = sum(max(0.0, lane.prefill_end - now) for lane in self.macro.order)
        kept, dropped = keep_feasible(expiry, now, busy, len(self.macro.order))
        self._price = max((w.density for w in dropped), default=0.0)
        for w in kept:
            if w.place == DEFERRED:
                self._queues.put(w, MAIN)
        for w in dropped:
            if w.place == MAIN:
                self._queues.put(w, DEFERRED)

    # ------------------------------------------------------------ serving

    def _contended(self) -> bool:
        """Several tenants have more waiting than the replicas take at once."""
        return self.shares.several and len(self._queues) > self.macro.room

    def _serve_valued(self, lanes: list[Lane], r: Round) -> None:
        """Overload: by value; between tenants by the tokens they have had."""
        queues = self._queues
        while lanes and queues.overdue(r.now):
            if not self._serve(queues.main, MAIN, lanes, r, "waited long", most=1):
                break
        tenants = {t: heap for t, heap in queues.valued.items() if heap}
        why, most = "tokens per second, overload", RELEASES_MAX
        if len(tenants) > 1:
            why, most = "least served tenant, tokens per second", 1
        while tenants and lanes and r.count < RELEASES_MAX:
            tenant = min(tenants, key=self.shares.counter)
            if not self._serve(tenants[tenant], MAIN, lanes, r, why, most=most):
                del tenants[tenant]

    def _serve(
        self,
        queue: list[Item],
        place: int,
        lanes: list[Lane],
        r: Round,
        order: str,
        most: int = RELEASES_MAX,
    ) -> int:
        """Release from the head of a queue while somebody fits somewhere; returns how many."""
        passed: list[Item] = []
        before = r.count
        most = min(RELEASES_MAX, before + most)
        while queue and lanes and len(passed) <= LOOK_AHEAD and r.count < most:
            item = heapq.heappop(queue)
            w = item[3]
            if w.place != place:
                continue
            lane = self._choose(w, lanes, r.now)
            if lane is None:
                passed.append(item)
                continue
            why = order if not passed else f"{order}, {len(passed)} before it fit nowhere now"
            self._release(w, lane, lanes, r, why)
        for item in passed:
            heapq.heappush(queue, item)
        if r.count >= RELEASES_MAX:
            self._wake = r.now
        return r.count - before

    def _choose(self, w: Waiting, lanes: list[Lane], now: float) -> Lane | None:
        """The replica where it and everybody there keep their limits, at the least expense.

        Expense: its time and the delay it brings to the others, over the quality.
        """
        best, least = None, INFINITY
        epsilon, safety, active = self._epsilon, self._safety, self.macro.active
        overload = self._price > 0
        bound, adapter, need, plain = w.bound, w.request.adapter, w.kv, w.plain
        for lane in lanes:
            view, flight = lane.view, len(lane.flight)
            if flight >= view.b_limit or not lane.room(need):
                continue
            first, end, delay = lane.predict(w, now)
            if bound:
                # An empty replica may try what is tight: nobody is hurt by it.
                margin = epsilon + safety * (end - now) if flight or overload else 0.0
                if end + margin > w.due if plain else not w.met(first, end, margin):
                    continue
            if flight and delay * (1 + safety) + epsilon > lane.slack():
                continue
            score = (end - now + delay * flight) / lane.quality
            if lane.latency is None:
                score = flight / view.b_limit
            if lane.rank >= active:  # only where it saves much, or nobody inside can do it
                score += OUTSIDE_SHARE * (w.due - now) if bound and w.due < INFINITY else OUTSIDE
            if adapter is not None and adapter not in view.adapters:
                score += 1.0
            if score < least:
                best, least = lane, score
        return best

    def _release(self, w: Waiting, lane: Lane, lanes: list[Lane], r: Round, why: str) -> None:
        slack = w.latest - r.now
        end = lane.release(w, r.now, self._safety)
        self._where[w.request.id] = lane
        self._remove(w)
        self.shares.charge(w.request.tenant, w.request.prompt_tokens, w.output)
        r.add(lane, w, end, slack, why)
        if len(lane.flight) >= lane.view.b_limit:
            lanes.remove(lane)
        elif lane.prefill_end > r.now + self._lead:
            lanes.remove(lane)
            self._wake = min(self._wake, lane.prefill_end - self._lead)

    def _serve_late(self, lanes: list[Lane], r: Round) -> None:
        """Hopeless requests, oldest first, on the replicas that the load can spare."""
        oldest = self._queues.oldest_late()
        spare = self.macro.spare()
        if spare < 1 and oldest is not None and r.now - oldest.arrived > LATE_AGE:
            spare = 1
        used = {lane.view.id for lane in self.macro.order if lane.background}
        while lanes and (w := self._queues.oldest_late()) is not None:
            lane = self._late_lane(w, lanes, used, spare)
            if lane is None:
                return
            w.late = True
            used.add(lane.view.id)
            self._release(w, lane, lanes, r, "hopeless, after all others")

    def _late_lane(self, w: Waiting, lanes: list[Lane], used: set[str], spare: int) -> Lane | None:
        best, least = None, INFINITY
        for lane in lanes:
            is_used = lane.view.id in used
            if (not is_used and len(used) >= spare) or lane.background >= LATE_PER_LANE:
                continue
            if not lane.room(w.kv) or lane.slack() < lane.predict(w, 0.0)[2] + self._epsilon:
                continue
            if len(lane.flight) < least:
                best, least = lane, len(lane.flight)
        return best

    def _remove(self, w: Waiting) -> None:
        self._queues.remove(w)
        self.shares.leave(w.request.tenant)

    def _refuse(self, now: float) -> list[Action]:
        """Hopeless requests are told so, with the time until the queue has drained."""
        actions: list[Action] = []
        wait = max(1.0, self.macro.backlog_seconds(self._queues.main, now))
        while (w := self._queues.oldest_late()) is not None:
            self._remove(w)
            reason = (
                f"cannot be answered within its latency limits: slack {w.latest - now:.3f} s, "
                f"{w.output:.0f} output tokens expected"
            )
            actions.append(Shed(request=w.request.id, reason=reason, retry_after=math.ceil(wait)))
        return actions
