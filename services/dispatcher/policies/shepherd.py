"""Shepherd's Flex (Zhang et al., NSDI'23): the largest batch that meets its earliest deadline.

One queue an adapter, ordered by deadline; requests that cannot meet theirs even alone are taken
out. A replica that is idle runs the largest feasible batch over all adapters; on an arrival a
batch at least ``preempt`` (3.03) times as large as the running one preempts it.

Adaptations to LLMs, where a batch has no fixed latency: Flex is applied per dispatch, the latency
of a batch is its predicted prefill plus its longest expected output; requests hold their tokens,
so a preemption takes back only members that have not begun; one group, since all replicas hold
the same base (the Herd planner has nothing to place). Requests taken out run when a replica is
idle and no feasible one waits (``on_overload: best_effort``) or are refused (``shed``); what no
serving replica could hold waits apart. Rules as
clarified by the authors: the feasibility test uses the size with the new member, a batch's
deadline is its earliest.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence

from services.dispatcher.policies.apart import Apart
from services.dispatcher.policies.base import (
    Action,
    Completion,
    Preempt,
    Promote,
    Release,
    ReplicaView,
    Request,
    Shed,
    StepSeen,
)
from services.dispatcher.policies.fleet import Fleet, Member
from services.dispatcher.policies.parts.fit import StepFit
from services.dispatcher.policies.parts.lengths import Lengths
from services.dispatcher.policies.parts.outflow import Outflow
from shared.demand import drain_seconds
from shared.latency import LatencyModel

LOOK = 256  # requests of a queue that are looked at for one batch
FAR = 1e12  # deadline of a request without one
LATE_BATCH = 8
RETRY_SECONDS = 1.0  # named with a refusal while nothing has been released


class Shepherd:
    """``preempt``: how many times larger a batch must be to preempt; ``epsilon``: margin, s."""

    name = "shepherd"

    def __init__(
        self, *, preempt: float = 3.03, epsilon: float = 0.005, on_overload: str = "best_effort"
    ) -> None:
        if on_overload not in ("best_effort", "shed"):
            raise TypeError(f"on_overload: best_effort or shed expected, {on_overload!r} given")
        self.fleet = Fleet()
        self.fit, self.lengths, self._outflow = StepFit(), Lengths(), Outflow()
        self._preempt, self._epsilon, self._shed = preempt, epsilon, on_overload == "shed"
        self._queues: dict[str | None, list[tuple[float, str]]] = {}  # adapter -> by deadline
        self._requests: dict[str, Request] = {}
        self._late: deque[str] = deque()
        self._apart = Apart()
        self._begun: dict[str, float] = {}  # request -> when its prefill is expected to begin
        self._arrived = False

    # ------------------------------------------------------------ events

    def on_arrival(self, request: Request, now: float) -> None:
        self._requests[request.id] = request
        if not self._apart.takes(request):
            self._enqueue(request)

    def on_cancel(self, request_id: str, now: float) -> bool:
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if not self._apart.drop(request_id):
            self._unqueue(request)
        return True

    def on_replica(self, replica: ReplicaView, now: float) -> None:
        self.fleet.tell(replica)

    def on_replica_gone(self, replica_id: str, now: float) -> None:
        for request in self.fleet.drop(replica_id):
            self._begun.pop(request.id, None)
        self.fit.forget(replica_id)

    def on_completion(self, completion: Completion, now: float) -> None:
        ended = self.fleet.finish(completion)
        self._begun.pop(completion.id, None)
        if ended is not None:
            self.lengths.learn(ended[1], completion)

    def on_step(self, step: StepSeen, now: float) -> None:
        self.fit.learn(step)

    def restore(self, replica_id: str, requests: Sequence[Request], now: float) -> None:
        member = self.fleet.get(replica_id)
        if member is not None:
            self.fleet.assign(member, requests)

    def queued(self) -> int:
        return len(self._requests)

    def next_wake(self, now: float) -> float | None:
        return None

    # ------------------------------------------------------------ Flex

    def decide(self, now: float) -> list[Action]:
        if not self._requests:
            return []
        serving = self.fleet.dispatchable()
        if not serving:
            return [Promote(replica=m.view.id) for m in self.fleet.idle()[:1]]
        for request in self._apart.look(serving):
            self._enqueue(request)
        actions: list[Action] = []
        self._take_out_hopeless(serving[0], now)
        if self._shed:
            actions += self._refuse(now)
        for member in serving:
            if member.load == 0:
                actions += self._run(member, self._batch(member, now), now, "largest feasible")
        if self._arrived:
            actions += self._preemptions(serving, now)
        self._arrived = False
        for member in serving:
            if member.load == 0 and self._late:
                actions += self._run(member, self._late_batch(member), now, "hopeless")
        return actions + self._apart.promotion(self.fleet.idle())

    def _batch(self, member: Member, now: float) -> list[Request]:
        """BatchGen: the largest feasible batch over all adapters."""
        best: list[Request] = []
        for queue in self._queues.values():
            batch: list[Request] = []
            prompt, longest, due = 0.0, 0.0, FAR
            for deadline, key in queue[:LOOK]:
                request = self._requests[key]
                if len(batch) >= member.view.b_limit:
                    break
                if not member.fits(request):
                    if self._apart.takes(request):
                        self._unqueue(request)
                    continue
                prompt += request.prompt_tokens
                longest = max(longest, self.lengths.expect(request))
                due = min(due, deadline)
                if now + self._seconds(member, len(batch) + 1, prompt, longest) > due:
                    break
                batch.append(request)
            if len(batch) > len(best):
                best = batch
        return best

    def _seconds(self, member: Member, b: int, prompt: float, output: float) -> float:
        model = self._model(member)
        if model is None:
            return 0.0
        B = member.view.B
        return self._epsilon + model.t_prefill(prompt, B) + output * model.t_infer(b, B)

    def _model(self, member: Member) -> LatencyModel | None:
        return member.view.latency or self.fit.model(member.view.id)

    def _run(self, member: Member, batch: list[Request], now: float, why: str) -> list[Action]:
        if not batch:
            return []
        begin, model = now, self._model(member)
        for request in batch:
            self._requests.pop(request.id)
            self._unqueue(request)
            self._begun[request.id] = begin
            begin += 0.0 if model is None else model.t_prefill(request.prompt_tokens)
        self.fleet.assign(member, batch)
        self._outflow.left(len(batch), now)
        keys = tuple(r.id for r in batch)
        numbers: dict[str, float | str] = {"order": why, "batch": len(batch)}
        return [Release(replica=member.view.id, requests=keys, why=numbers)]

    def _preemptions(self, serving: list[Member], now: float) -> list[Action]:
        """Take back what has not begun where a much larger batch waits."""
        for member in serving:
            fresh = [key for key in member.flight if self._begun.get(key, 0.0) > now]
            if not fresh:
                continue
            waiting = self._batch(member, now)
            if len(waiting) >= self._preempt * member.load:
                return [Preempt(replica=member.view.id, requests=tuple(fresh))]
        return []

    # ------------------------------------------------------------ hopeless requests

    def _take_out_hopeless(self, member: Member, now: float) -> None:
        for queue in self._queues.values():
            while queue:
                deadline, key = queue[0]
                request = self._requests[key]
                output = self.lengths.expect(request)
                if now + self._seconds(member, 1, request.prompt_tokens, output) <= deadline:
                    break
                queue.pop(0)
                self._late.append(key)

    def _late_batch(self, member: Member) -> list[Request]:
        """The oldest that the replica could hold."""
        batch: list[Request] = []
        passed: list[str] = []
        most = min(LATE_BATCH, member.view.b_limit)
        while self._late and len(batch) < most and len(passed) < LOOK:
            key = self._late.popleft()
            request = self._requests.get(key)
            if request is None or self._apart.takes(request):
                continue
            if member.fits(request):
                batch.append(request)
            else:
                passed.append(key)
        self._late.extendleft(reversed(passed))
        return batch

    def _refuse(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if not self.lengths.known:
            return actions
        queued = len(self._requests) - len(self._late)
        wait = drain_seconds(queued, self._outflow.rate(now), RETRY_SECONDS)
        while self._late:
            key = self._late.popleft()
            if self._requests.pop(key, None) is not None:
                reason = "cannot be answered within its latency limits"
                actions.append(Shed(request=key, reason=reason, retry_after=wait))
        return actions

    def _enqueue(self, request: Request) -> None:
        queue = self._queues.setdefault(request.adapter, [])
        bisect.insort(queue, (_deadline(request), request.id))
        self._arrived = True

    def _unqueue(self, request: Request) -> None:
        queue = self._queues.get(request.adapter, [])
        at = bisect.bisect_left(queue, (_deadline(request), request.id))
        if at < len(queue) and queue[at][1] == request.id:
            queue.pop(at)


def _deadline(request: Request) -> float:
    """One deadline a request: the earliest of what it names."""
    due = FAR if request.deadline is None else request.deadline
    if request.ttft_deadline is not None and request.deadline is None:
        due = request.ttft_deadline + (request.tpot or 0.0) * request.max_tokens
    return due
