"""The dispatcher while it holds the lease: readers post events, one loop decides and acts.

Everything that changes books or asks a policy happens in ``_turn``; the readers only append to
the inbox. When anything goes wrong between here and Redis (connection, lost group, lost lease)
the whole run ends with that error, and the next one starts from what Redis holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from services.dispatcher.counters import Counters
from services.dispatcher.desk import Desk
from services.dispatcher.entries import Entry
from services.dispatcher.housekeeping import Housekeeping
from services.dispatcher.intake import Intake
from services.dispatcher.outbox import Outbox
from services.dispatcher.policies.base import (
    Action,
    Preempt,
    Promote,
    Release,
    ReplicaView,
    Shed,
    Suspend,
)
from services.dispatcher.policies.registry import create
from services.dispatcher.recovery import Released, batches_of, declare_dead, reap
from services.dispatcher.settings import DispatcherSettings
from services.dispatcher.signals import Signals, completions_of, step_of
from services.dispatcher.watch import ReplicaWatch, Round, Trust, view_of
from shared import demand
from shared.leader import Acting
from shared.messages import StepSample
from shared.records import ReplicaRecord
from shared.replica_state import event

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.25  # between two looks at the replicas; a state change is seen at once
TURN_SECONDS = 1.0  # the loop turns at least this often: its heartbeat
METER_TURNS = 5  # housekeeping rounds between two looks at Redis's own numbers
INBOX_MAX = 10_000  # events waiting for the loop before readers pause

Event = Callable[[float], None]


class Active:
    """One run; the loop tells ``acting`` of each of its turns."""

    def __init__(self, acting: Acting, settings: DispatcherSettings, counters: Counters) -> None:
        redis, lease, clock = acting.redis, acting.lease, acting.clock
        self._acting, self._redis, self._lease, self._clock = acting, redis, lease, clock
        self._settings, self._counters = settings, counters
        self.desks: dict[str, Desk] = {}
        self._model_of: dict[str, str] = {}  # replica -> model
        self._incarnation: dict[str, str] = {}
        self._entered: dict[str, str] = {}  # replica -> incarnation whose stream has been read
        self._inbox: deque[Event] = deque()
        self._wake, self._look = asyncio.Event(), asyncio.Event()
        self._drained = asyncio.Event()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        trust = Trust()
        self._watch = ReplicaWatch(redis, trust)
        self._intake = Intake(
            redis, lease, clock, settings.read_count, self._post_request, self._post_cancel
        )
        self._signals = Signals(redis, self._post_step, self._look.set)
        self._outbox = Outbox(redis, lease, clock, counters, settings.decisions_kept)
        self._housekeeping = Housekeeping(redis, lease, clock, trust, counters.reconciled)

    async def run(self) -> None:
        """Recover, then serve until something ends it (always by an exception)."""
        await self._recover()
        async with asyncio.TaskGroup() as group:
            for task in (
                self._read_requests,
                self._read_signals,
                self._watch_replicas,
                self._keep_house,
                self._decide,
            ):
                group.create_task(task(), name=task.__name__)

    # ------------------------------------------------------------ start

    async def _recover(self) -> None:
        """Books from Redis: replicas, what is in flight on them, what an earlier one left."""
        await self._signals.start_now()
        found = await self._apply(await self._watch.look())
        self._drain_inbox(self._now())
        if found:
            self._signals.start_at(min(int(b.stream_id.split(b"-")[0]) for b in found))
        claimed = await self._intake.recover()
        self._counters.recovered.inc(claimed)
        self._acting.alive()
        in_flight = sum(len(d.flying) for d in self.desks.values())
        log.info(
            "active: %d models, %d replicas, %d requests in flight, %d claimed",
            *(len(self.desks), len(self._model_of), in_flight, claimed),
        )

    # ------------------------------------------------------------ readers

    async def _read_requests(self) -> None:
        while True:
            if not self._intake.models:
                await asyncio.sleep(WATCH_SECONDS)  # no model is served yet
                continue
            await self._room()
            await self._intake.read()

    async def _read_signals(self) -> None:
        while True:
            await self._room()
            await self._signals.read()

    async def _watch_replicas(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # then it is the regular look
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._look.wait()
            self._look.clear()
            found = await self._apply(await self._watch.look())
            for batch in found:  # samples that told of them may have gone by
                self._housekeeping.suspect(batch.replica)

    async def _keep_house(self) -> None:
        for turn in itertools.count():
            await asyncio.sleep(TURN_SECONDS)
            if turn % METER_TURNS == 0:
                await self._counters.redis.look(self._redis, self.desks, self._model_of)
            claimed = await self._intake.claim()
            self._counters.recovered.inc(claimed)
            for report in await self._housekeeping.round(self.desks):
                self._post(report)
            await self._tell_demand()

    async def _tell_demand(self) -> None:
        for model, desk in list(self.desks.items()):  # a further one may open meanwhile
            self._counters.queued.labels(model).set(len(desk.waiting))
            self._counters.in_flight.labels(model).set(len(desk.flying))
            await demand.write(self._redis, model, desk.demand.summary(self._now()))

    async def _room(self) -> None:
        """Pause a reader while the loop is behind."""
        while len(self._inbox) > INBOX_MAX:
            self._drained.clear()
            await self._drained.wait()

    # ------------------------------------------------------------ events

    def _post(self, happened: Event) -> None:
        self._inbox.append(happened)
        self._wake.set()

    def _post_request(self, model: str, entry: Entry) -> None:
        desk = self.desks[model]
        self._post(partial(desk.arrive, entry))
        self._counters.received.labels(model).inc()

    def _post_cancel(self, model: str, request_id: str) -> None:
        desk = self.desks[model]
        self._post(partial(desk.cancel, request_id))

    def _post_step(self, sample: StepSample) -> None:
        if not self._housekeeping.in_sequence(sample):
            log.warning("samples of %s are missing: comparing with its stream", sample.replica)
        self._post(partial(self._step, sample))

    def _step(self, sample: StepSample, now: float) -> None:
        model = self._model_of.get(sample.replica)
        if model is None or sample.incarnation != self._incarnation[sample.replica]:
            return
        desk = self.desks[model]
        for completion in completions_of(sample):
            desk.finish(completion, now)
        desk.policy.on_step(step_of(sample), now)

    # ------------------------------------------------------------ replicas

    async def _apply(self, seen: Round) -> list[Released]:
        """Take over what a look at the replicas brought; returns what lay in streams already."""
        found: list[Released] = []
        for model in {*seen.models, *(r.model for r in seen.seen)} - set(self.desks):
            await self._open(model)
        for model, replica in seen.gone:
            self._entered.pop(replica, None)
            if replica in self._model_of:
                self._post(partial(self._gone, model, replica))
        for record in seen.seen:
            own = await self._enter(record)
            view = view_of(record)
            self._post(partial(self._see, record.model, view, record.incarnation, own))
            found += own
        for death in seen.dead:
            await self._bury_replica(death.replica, death.incarnation)
        for replica, incarnation in seen.stale:
            lost = await reap(self._redis, self._lease, replica, incarnation)
            if lost:
                await self._tell_lost(replica, lost, "an earlier life's")
        return found

    async def _enter(self, record: ReplicaRecord) -> list[Released]:
        """What lies in the stream of a replica that is seen for the first time."""
        if self._entered.get(record.id) == record.incarnation:
            return []
        found = await batches_of(self._redis, record.id)
        self._entered[record.id] = record.incarnation
        return [b for b in found if b.incarnation == record.incarnation]  # others are given back

    def _see(
        self, model: str, view: ReplicaView, incarnation: str, own: list[Released], now: float
    ) -> None:
        self._model_of[view.id], self._incarnation[view.id] = model, incarnation
        desk = self.desks[model]
        desk.see(view, now)
        for batch in own:
            desk.restore(view.id, list(batch.entries), batch.released, now)

    def _gone(self, model: str, replica: str, now: float) -> None:
        self._model_of.pop(replica, None)
        self._incarnation.pop(replica, None)
        self.desks[model].gone(replica, now)

    async def _open(self, model: str) -> None:
        """A desk for a model that is new here."""
        policy = create(self._settings.policy, **self._settings.policy_options)
        self.desks[model] = Desk(model, policy, self._settings.queue_max)
        await self._intake.add(model)
        log.info("serves model %r with policy %r", model, policy.name)

    async def _bury_replica(self, replica: str, incarnation: str) -> None:
        """Declare dead, then give back what it had."""
        if await declare_dead(self._redis, replica, incarnation):
            lost = await reap(self._redis, self._lease, replica)
            await self._tell_lost(replica, lost, "heartbeat lost")

    async def _tell_lost(self, replica: str, requests: int, why: str) -> None:
        self._counters.lost.inc(requests)
        by = "dispatcher"
        await event(self._redis, "lost", replica=replica, requests=requests, by=by, why=why)

    # ------------------------------------------------------------ the loop

    async def _decide(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._turn()

    async def _turn(self) -> None:
        now = self._now()
        self._drain_inbox(now)
        started = time.perf_counter()
        for desk in self.desks.values():
            desk.refuse_misfits(now)
            for action in desk.policy.decide(now):
                self._act(desk, action, now)
        self._counters.decision.observe(time.perf_counter() - started)
        await self._outbox.flush(list(self.desks.values()))
        self._arm(self._now())
        self._acting.alive()

    def _drain_inbox(self, now: float) -> None:
        inbox = self._inbox
        while inbox:
            inbox.popleft()(now)
        self._drained.set()

    def _act(self, desk: Desk, action: Action, now: float) -> None:
        match action:
            case Release():
                incarnation = self._incarnation.get(action.replica, "")
                self._outbox.release(desk, action, incarnation, now)
            case Shed():
                desk.shed(action.request, action.reason, action.retry_after)
            case Promote():
                self._outbox.promote(action)
            case Suspend():
                self._outbox.suspend(action)
            case Preempt():
                self._outbox.preempt(desk, action)

    def _arm(self, now: float) -> None:
        """Wake the loop when a policy wants it, at the latest after TURN_SECONDS."""
        wakes = [w for d in self.desks.values() if (w := d.policy.next_wake(now)) is not None]
        delay = min([TURN_SECONDS, *(max(0.0, w - now) for w in wakes)])
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, self._wake.set)

    def _now(self) -> float:
        """Redis time that never goes backwards, as policies are promised."""
        self._last = max(self._last, self._clock())
        return self._last
