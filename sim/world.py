"""The simulated cluster: the services' own policy objects on virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from services.dispatcher.credit import CreditClock
from services.dispatcher.policies.base import (
    Completion,
    Policy,
    Preempt,
    Promote,
    Release,
    ReplicaView,
    Shed,
    StepSeen,
    Suspend,
)
from shared.profile import Profile
from shared.replica_state import DISPATCHABLE, State
from sim.events import arrival, delivery, turn, wake
from sim.job import Job
from sim.kernel import Kernel
from sim.recorder import Recorder
from sim.replica import Batching, Replica, Span

if TYPE_CHECKING:
    from sim.federation import Federation

WATCH_EVENTS = 5_000  # events between two looks from outside
SHORTEST_WAKE = 1e-4  # seconds; a policy cannot be asked more often without an event


class Delays(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the control plane adds, in seconds; measure it with ``python -m bench.control``."""

    request: float = 0.0015  # client -> dispatcher
    release: float = 0.0010  # dispatcher -> engine
    reply: float = 0.0010  # engine -> client
    turn: float = 0.0  # least time between two decisions of the dispatcher


class World:
    """All that events act on."""

    def __init__(
        self,
        policy: Policy,
        profiles: list[Profile],
        jobs: Iterator[Job],
        *,
        batching: Batching,
        delays: Delays,
        b_limit: int | None = None,
        seed: int = 0,
        adapters: Sequence[str] = (),
        learn: bool = False,
    ) -> None:
        self.kernel = Kernel()
        self._learn = learn  # the policy is told of steps, not of coefficients
        self.observers: list[Callable[[StepSeen, float], None]] = []  # of what replicas report
        if learn:
            self.observers.append(policy.on_step)
        self._credit = CreditClock()
        self.policy, self.delays = policy, delays
        self._adapters = dict.fromkeys(adapters, "1")  # every replica serves all of them
        names = [f"replica-{k}" for k in range(len(profiles))]
        self.recorder = Recorder(names)
        self.replicas: dict[str, Replica] = {}
        self.states = dict.fromkeys(names, State.SERVING)
        self.quality = dict.fromkeys(names, 1.0)
        self.jobs: dict[str, Job] = {}
        self.federation: Federation | None = None
        self.base_quality = 1.0  # 1 / cross-entropy of the adapter that is served at the start
        self.more_to_come = True
        self.ended = 0.0  # when the last request ended
        self.preempted = 0  # requests taken back from replicas
        self._room = max((min(p.context, p.kv_tokens) for p in profiles), default=0)
        self.armed: float | None = None
        self.decisions = 0
        self.decision_seconds = 0.0  # of this machine's processor, not of virtual time
        self._last_decision = -1.0
        self._source = jobs
        for k, (name, profile) in enumerate(zip(names, profiles, strict=True)):
            limit = min(profile.b_max, b_limit or profile.b_max)
            row = self.recorder.row_of[name]
            self.replicas[name] = Replica(name, row, profile, batching, limit, seed * 7919 + k)
            self.announce(name)
        self.draw_arrival()

    # ------------------------------------------------------------ arrivals and ends

    def draw_arrival(self) -> None:
        """Put the next request of the workload on the heap."""
        job = next(self._source, None)
        self.more_to_come = job is not None
        if job is not None:
            self.kernel.push(job.received + self.delays.request, arrival.handle, job)
        self._look_for_the_end()  # the last one may have been refused

    def enter(self, job: Job) -> bool:
        """Count an arrival; False for one that no replica could ever hold (refused at once)."""
        self.recorder.offered(job)
        if job.kv > self._room:
            self.recorder.unfinished(job)
            return False
        self.jobs[job.request.id] = job
        if self.federation is not None:
            self.federation.arrived(job)
        job.came = self._credit.seconds(self.kernel.now)
        self.policy.on_arrival(job.request, self.kernel.now)
        return True

    def finish(self, job: Job, replica: Replica) -> None:
        """Its last token is computed."""
        request_id = job.request.id
        del self.jobs[request_id]
        now = self.kernel.now
        self._credit.loaded(replica.name, -1, now)
        quality = self.base_quality if self.federation is None else self.federation.rounds.quality
        self.recorder.finished(job, now, self.delays.reply, quality)
        if self.federation is not None:
            self.federation.finished(job, replica.name)
        self._one_ended()
        reason = "length" if job.output >= job.request.max_tokens else "stop"
        self.policy.on_completion(
            Completion(
                id=request_id, replica=replica.name, output_tokens=job.output, reason=reason
            ),
            now,
        )

    def stepped(self, replica: Replica, span: Span) -> None:
        """A span has ended: the report that a replica would send of it."""
        steps = span.steps
        seen = StepSeen(
            replica=replica.name,
            seconds=steps * span.seconds,
            steps=steps,
            b=span.decoding + len(span.chunks),
            B=span.B,
            prefill_tokens=steps * sum(tokens for _, tokens in span.chunks),
            decode_tokens=steps * span.decoding,
            waiting=len(replica.waiting),
            kv_used=replica.kv_used,
        )
        for observer in self.observers:
            observer(seen, self.kernel.now)

    def _one_ended(self) -> None:
        self.ended = self.kernel.now
        self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        self.kernel.stopped = not (self.more_to_come or self.jobs)

    def run(self, watch: Callable[[World], None] | None = None) -> None:
        """Until every request has ended; those that nothing can end count as failed."""
        kernel = self.kernel
        while len(kernel) and not kernel.stopped:
            kernel.run(self, WATCH_EVENTS)
            if watch is not None:
                watch(self)
        for job in self.jobs.values():
            self.recorder.unfinished(job)

    # ------------------------------------------------------------ decisions

    def decide(self) -> None:
        """Something happened: ask the policy, at most once in ``delays.turn`` seconds."""
        due = self._last_decision + self.delays.turn
        if due > self.kernel.now:
            self.arm(due)
        else:
            self.decide_now()

    def decide_now(self) -> None:
        """Carry out everything the policy wants now, then arm its next wake."""
        now = self._last_decision = self.kernel.now
        self.decisions += 1
        began = time.thread_time()
        actions = self.policy.decide(now)
        self.decision_seconds += time.thread_time() - began
        for action in actions:
            match action:
                case Release():
                    self._release(action)
                case Shed():
                    self.recorder.shed(self.jobs.pop(action.request), now)
                    self._one_ended()
                case Promote():
                    self.move(action.replica, State.SERVING)
                case Preempt():
                    self._preempt(action)
                case Suspend():
                    self._suspend(action)
        wanted = self.policy.next_wake(now)
        if wanted is not None:
            self.arm(max(wanted, now + SHORTEST_WAKE))

    def arm(self, moment: float) -> None:
        """Wake the policy at ``moment`` unless it is woken earlier anyway."""
        if self.armed is None or moment < self.armed:
            self.armed = moment
            self.kernel.push(moment, wake.handle, moment)

    def _release(self, action: Release) -> None:
        replica = self.replicas[action.replica]
        jobs = [self.jobs[r] for r in action.requests]
        clock = self._credit.seconds(self.kernel.now)
        for job in jobs:
            job.replica = replica.name
            job.held += clock - job.came
            if self.federation is not None:
                self.federation.released(job)
        self._credit.loaded(replica.name, len(jobs), self.kernel.now)
        sent = [(job, job.attempt) for job in jobs]
        self.kernel.push(self.kernel.now + self.delays.release, delivery.handle, (replica, sent))

    def deliver(self, replica: Replica, sent: Sequence[tuple[Job, int]]) -> None:
        """A release reaches its replica; what was taken back on the way is left out."""
        jobs = [job for job, attempt in sent if job.attempt == attempt]
        end = replica.accept(jobs, self.kernel.now) if jobs else None
        if end is not None:
            self.schedule_turn(replica, end)

    def schedule_turn(self, replica: Replica, moment: float) -> None:
        self.kernel.push(moment, turn.handle, (replica, replica.generation))

    def _preempt(self, action: Preempt) -> None:
        """Unfinished requests are queued again; what was computed of them is lost.

        The policy learns both, as from the services: they have left their replica, and wait anew.
        """
        replica, now = self.replicas[action.replica], self.kernel.now
        there = (self.jobs.get(request) for request in action.requests)
        taken = [job for job in there if job is not None and job.replica == replica.name]
        replica.take_back({job.request.id for job in taken})
        for job in taken:
            job.reset()
            job.attempt += 1
            job.request = msgspec.structs.replace(job.request, attempt=job.attempt)
            job.came = self._credit.seconds(now)
            self._credit.loaded(replica.name, -1, now)
            self.policy.on_completion(
                Completion(
                    id=job.request.id, replica=replica.name, output_tokens=0, reason="cancelled"
                ),
                now,
            )
            self.policy.on_arrival(job.request, now)
        self.preempted += len(taken)
        self.arm(now + SHORTEST_WAKE)

    def _suspend(self, action: Suspend) -> None:
        for name in action.replicas:
            trainer = self.replicas[name].trainer
            if trainer is not None:
                trainer.suspend(action.wanted, self.kernel.now)
                self.announce(name)
                if self.federation is not None and not action.wanted:
                    self.federation.rounds.resumed(name)

    # ------------------------------------------------------------ replicas

    def move(self, name: str, state: State) -> None:
        """Change a replica's state and tell the policy."""
        self.states[name] = state
        self.announce(name)

    def announce(self, name: str) -> None:
        """Tell the policy how a replica stands."""
        replica, state = self.replicas[name], self.states[name]
        profile, trainer = replica.profile, replica.trainer
        view = ReplicaView(
            id=name,
            dispatchable=state in DISPATCHABLE,
            idle=state is State.IDLE,
            training=state is State.COMBINED,
            b_limit=replica.b_limit,
            b_max=profile.b_max,
            B=0 if trainer is None else trainer.effective,
            B_wanted=0 if trainer is None else trainer.B,
            kv_total=profile.kv_tokens,
            context=profile.context,
            adapters=self._adapters,
            quality=self.quality[name],
            latency=None if self._learn else profile.coefficients,
        )
        self._credit.see(view, self.kernel.now)
        self.policy.on_replica(view, self.kernel.now)
