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
from services.dispatcher.policies.parts.path import PathLag
from services.dispatcher.policies.parts.placement import Placement
from services.dispatcher.policies.parts.plan import Plan
from services.dispatcher.policies.parts.queues import Queues
from services.dispatcher.policies.parts.share import TokenShares
from services.dispatcher.policies.parts.waiting import DEFERRED, LATE, MAIN, Waiting

LEAD_SECONDS = 0.02  # a release goes out this long before the replica can begin with it
FCFS_HORIZON = 60.0  # a request without a SLO has the slack of one due after this long


class Collm:
    """See the module. Times in seconds.

    ``epsilon``: least control overhead from decision to client, until more is measured;
    ``safety``: share of a predicted time added to it; ``headroom``: capacity kept free (h);
    ``on_overload``: best_effort | shed; ``consolidate``: fill the batches of the first
    replicas and leave those that the load does not need without requests.
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
        consolidate: bool = True,
    ) -> None:
        if on_overload not in ("best_effort", "shed"):
            raise TypeError(f"on_overload: best_effort or shed expected, {on_overload!r} given")
        self._shed = on_overload == "shed"
        self.lengths = Lengths(prior_output, output_quantile)
        self.fit = StepFit()
        self.shares = TokenShares()
        self._path, self._epsilon = PathLag(), epsilon
        self.lanes: dict[str, Lane] = {}
        self._queues = Queues()
        self.macro = Macro(headroom, consolidate=consolidate)
        self._plan = Plan(self._queues, self.macro)
        self._placement = Placement(
            self.macro, self._queues, self.shares, safety=safety, lead=lead, fill=consolidate
        )

    # ------------------------------------------------------------ events

    def on_arrival(self, request: Request, now: float) -> None:
        self._path.arrived(request, now)
        back = self._path.seconds(now)
        least, output, most = self.lengths.forecast(request)
        typical = self.macro.typical
        cost, latest = 0.0, INFINITY
        prefill, alone = 0.0, 0.0
        if typical is not None:
            prefill = typical.t_prefill(request.prompt_tokens)
            alone = prefill + output * (typical.alpha0 + typical.alpha1)
            cost = prefill + output * self.macro.token_seconds
        if request.deadline is not None:
            latest = request.deadline - alone - back
        if request.ttft_deadline is not None:
            latest = min(latest, request.ttft_deadline - prefill - back)
        if latest == INFINITY:
            latest = request.arrival + FCFS_HORIZON
        w = Waiting(request, output, cost, latest, now, (least, most))
        self.shares.enter(request.tenant)
        self.macro.arrived(w, hopeless=latest < now)
        if w.bound and latest < now:
            self._queues.enter(w, LATE)
        else:
            # One without limits is not weighed: it is first come, first served.
            cheap = w.bound and w.density < self._plan.price
            self._queues.enter(w, DEFERRED if cheap else MAIN)
        self._plan.changed = True

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
        lane.tell(replica, replica.latency or lane.latency or self.fit.pooled())
        self.macro.told(lane)

    def on_replica_gone(self, replica_id: str, now: float) -> None:
        lane = self.lanes.pop(replica_id, None)
        self.fit.forget(replica_id)
        if lane is not None:
            for key in lane.flight:
                self._placement.where.pop(key, None)
            self.macro.gone(lane)

    def on_completion(self, completion: Completion, now: float) -> None:
        lane = self._placement.where.get(completion.id)
        if lane is None or lane.view.id != completion.replica:
            return
        del self._placement.where[completion.id]
        ended = completion.reason in ("stop", "length") and completion.output_tokens > 0
        running = lane.leave(completion.id, now, learn=ended, tokens=completion.output_tokens)
        self.macro.freed(lane)
        if running is None:
            return
        if ended:
            self.lengths.learn(running.waiting.request, completion)
        self._settle(running.waiting, completion)

    def _settle(self, w: Waiting, completion: Completion) -> None:
        """Its tenant is charged what it got; nothing for what its replica has refused or lost."""
        tenant, tokens = w.request.tenant, completion.output_tokens
        nothing = tokens == 0 and completion.reason in ("failed", "lost")
        prompt = -w.request.prompt_tokens if nothing else 0
        self.shares.settle(tenant, w.charged, prompt, tokens - w.output)

    def on_step(self, step: StepSeen, now: float) -> None:
        self.fit.learn(step)
        self.macro.saw(step)
        lane = self.lanes.get(step.replica)
        if lane is not None and lane.latency is not None:
            lane.saw(step, now)

    def restore(self, replica_id: str, requests: Sequence[Request], now: float) -> None:
        lane = self.lanes.get(replica_id)
        if lane is None:
            return
        for request in requests:
            least, output, most = self.lengths.forecast(request)
            w = Waiting(request, output, 0.0, INFINITY, now, (least, most))
            w.prompt = w.chunks = 0  # its prompt is through, as far as can be told
            lane.release(w, now)
            self._placement.where[request.id] = lane
        if requests:
            self.macro.engaged(lane)

    def queued(self) -> int:
        return len(self._queues)

    def smallest_apart(self) -> int | None:
        """Tokens of the smallest request that no serving replica holds; None: there is none."""
        return self._queues.smallest_apart()

    # ------------------------------------------------------------ decision

    def decide(self, now: float) -> list[Action]:
        actions: list[Action] = self.macro.cycle(self, now)
        self._placement.wake = INFINITY
        queues = self._queues
        if not queues.waiting:
            return actions
        if self.macro.order:
            queues.rejoin(self.macro.reach.largest, now)
        self._placement.epsilon = max(self._epsilon, self._path.seconds(now))
        self.macro.expired(queues.expire(now))
        queues.compact()
        # While lengths are a guess, hopeless requests are served after all others, not refused.
        refuses = self._shed and self.lengths.known
        if refuses and queues.late_count:
            actions += self._refuse(now)
        if self._placement.open(now):
            self._plan.renew(now)
            actions += self._placement.serve(now, self._plan.price, late=not refuses)
        if queues.waiting:
            actions += self.macro.promote(self, now)
        return actions

    def next_wake(self, now: float) -> float | None:
        wake = self.macro.next_cycle
        if self._queues.waiting:
            wake = min(wake, self._placement.wake)
            if self._queues.expiry:
                wake = min(wake, self._queues.expiry[0][0] + 1e-4)
        return max(wake, now)

    def _remove(self, w: Waiting) -> None:
        self._queues.remove(w)
        self.shares.leave(w.request.tenant)

    def _refuse(self, now: float) -> list[Action]:
        """Hopeless requests are told so, with the time until the queue has drained."""
        actions: list[Action] = []
        wait = max(1.0, self.macro.backlog_seconds(self._queues.main_cost, now))
        for tenant in list(self._queues.late):
            while (item := self._queues.next_late(tenant)) is not None:
                w = item[1]
                self._remove(w)
                reason = (
                    f"cannot be answered within its latency limits: slack {w.latest - now:.3f} s, "
                    f"{w.output:.0f} output tokens expected"
                )
                shed = Shed(request=w.request.id, reason=reason, retry_after=math.ceil(wait))
                actions.append(shed)
        return actions
