"""The desk of one model: its policy and the books of what waits and what is in flight.

Plain data, no Redis: events come in, effects go out (see ``effects``), so it is tested alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from services.dispatcher.credit import CreditClock
from services.dispatcher.demand_meter import DemandMeter
from services.dispatcher.entries import Entry, Flight, Refusal, id_of, misfit, overload
from services.dispatcher.policies.base import Completion, Policy, ReplicaView
from services.dispatcher.recalls import Outcome, Recalls, outcome_of
from services.dispatcher.remembered import Remembered
from services.dispatcher.room import lacking
from shared.demand import drain_seconds
from shared.messages import Lost

log = logging.getLogger(__name__)

CANCELS_MAX = 10_000  # cancelled ids that are kept for requests that are read after their cancel
FLUSH_SECONDS = 1.0  # from the decision to the replica's stream a release takes less than this
RETRY_SECONDS = 1.0  # named with a refusal while nothing has been released


class Desk:
    """Books of one model. ``refusals`` and ``cancels`` collect what is to be carried out."""

    def __init__(self, model: str, policy: Policy, queue_max: int) -> None:
        self.model, self.policy = model, policy
        self._queue_max = queue_max
        self.demand = DemandMeter()
        self._credit = CreditClock()
        self._came: dict[str, tuple[float, float]] = {}  # waiting: when queued, on both clocks
        self.waiting: dict[str, Entry] = {}
        self.flying: dict[str, Flight] = {}
        self._keys: dict[str, set[str]] = {}  # request id -> keys of its attempts
        self.replicas: dict[str, ReplicaView] = {}
        self._recalls = Recalls()
        self._cancelled = Remembered(CANCELS_MAX)
        self._room_changed = False
        self.refusals: list[Refusal] = []
        self.cancels: list[tuple[str, str]] = []  # (replica, request id) to forward

    # ------------------------------------------------------------ arrivals

    def arrive(self, entry: Entry, now: float) -> None:
        """A request was read (or claimed from an earlier dispatcher)."""
        here = self._held(entry.key)
        if here is not None and here.stream_id == entry.stream_id:
            return  # read again by a claim
        if entry.taken_from:
            self._copy_came(entry, now)
        elif here is not None:
            self.refusals.append(Refusal(entry, None))  # a second copy: one of them is enough
            log.warning("request %s came twice: the second copy is dropped", entry.key)
        elif entry.id in self._cancelled:
            self.refusals.append(Refusal(entry, None))  # its cancel was read first
        else:
            for key in list(self._keys.get(entry.id, ())):
                self._supersede(key, entry, now)
            self._admit(entry, now)

    def _held(self, key: str) -> Entry | None:
        flight = self.flying.get(key)
        return self.waiting.get(key) if flight is None else flight.entry

    def _admit(self, entry: Entry, now: float) -> None:
        """Queue it, unless nobody carries it or the queue is full (continuations are let in)."""
        why = lacking(self.model, self.replicas.values(), entry.request)
        if why is not None:
            self.refusals.append(misfit(entry, why))
        elif entry.attempt == 1 and len(self.waiting) >= self._queue_max:
            why = f"the queue of {self.model!r} is full ({self._queue_max} requests)"
            rate = self.demand.outflow.rate(now)
            wait = drain_seconds(len(self.waiting), rate, RETRY_SECONDS)
            self.refusals.append(overload(entry, why, wait))
        else:
            self.demand.arrived(entry.request, now)
            self._queue(entry, now)

    def _queue(self, entry: Entry, now: float) -> None:
        self.waiting[entry.key] = entry
        self._came[entry.key] = (now, self._credit.seconds(now))
        self._keys.setdefault(entry.id, set()).add(entry.key)
        self.policy.on_arrival(entry.request, now)

    def waits(self, key: str, now: float) -> tuple[float, float]:
        """Seconds that a waiting request has waited for the policy; how many of them on purpose."""
        came, clock = self._came[key]
        return now - came, self._credit.seconds(now) - clock

    def _supersede(self, key: str, entry: Entry, now: float) -> None:
        """An older attempt is still here: its gateway has given it up."""
        old = self.waiting.get(key)
        if old is not None:
            self.policy.on_cancel(key, now)
            self._forget(key)
            self.refusals.append(Refusal(old, None))
        elif (flight := self.flying.get(key)) is not None and flight.entry.attempt < entry.attempt:
            log.info("%s supersedes %s, which ran on %s", entry.key, key, flight.replica)

    def shed(self, key: str, reason: str, retry_after: float) -> None:
        """The policy refuses a queued request."""
        entry = self.waiting.get(key)
        if entry is not None:
            self._forget(key)
            self.refusals.append(overload(entry, reason, retry_after))

    # ------------------------------------------------------------ release and completion

    def take(self, keys: Iterable[str], replica: str, now: float) -> list[Entry]:
        """Queued requests leave for a replica; those unknown here are left out."""
        entries = []
        for key in keys:
            entry = self.waiting.pop(key, None)
            if entry is not None:
                self._came.pop(key, None)
                self._fly(key, Flight(entry, replica, now), now)
                self.demand.released(entry.request, now)
                entries.append(entry)
        return entries

    def _fly(self, key: str, flight: Flight, now: float) -> None:
        self.flying[key] = flight
        self._credit.loaded(flight.replica, 1, now)

    def _land(self, key: str, now: float) -> Flight | None:
        flight = self.flying.pop(key, None)
        if flight is not None:
            self._credit.loaded(flight.replica, -1, now)
        return flight

    def put_back(self, entries: Iterable[Entry], replica: str, now: float) -> None:
        """A release was refused: the requests are queued again."""
        for entry in entries:
            if self._land(entry.key, now) is None:
                continue
            self.policy.on_completion(_ended(entry.key, replica, "failed"), now)
            self._queue(entry.again(), now)

    def vanished(self, entries: Iterable[Entry], replica: str, now: float) -> None:
        """Entries that Redis no longer holds: their gateway will send them again."""
        for entry in entries:
            self.finish(_ended(entry.key, replica, "lost"), now)

    def finish(self, completion: Completion, now: float) -> None:
        """A released request left its replica; nothing happens if it was not in flight there."""
        flight = self.flying.get(completion.id)
        if flight is None or flight.replica != completion.replica:
            return
        self._land(completion.id, now)
        self._forget(completion.id)
        self.demand.answered(flight.entry.request, completion.output_tokens)
        self.policy.on_completion(completion, now)
        if completion.id in self._recalls:
            self._recall_ended(completion.id, outcome_of(completion), now)

    # ------------------------------------------------------------ preemption

    def recall(self, keys: Iterable[str], replica: str) -> list[Entry]:
        """The policy takes requests back from a replica: those that are in flight there."""
        entries = []
        for key in keys:
            flight = self.flying.get(key)
            if flight is not None and flight.replica == replica and key not in self._recalls:
                self._recalls.begin(key)
                entries.append(flight.entry)
        return entries

    def _copy_came(self, entry: Entry, now: float) -> None:
        """A copy that was queued when its request was taken back."""
        key = entry.key
        if key not in self._recalls:  # by an earlier dispatcher
            if key not in self.flying:
                self._resolve(entry, Outcome.LOST, now)
                return
            self.cancels.append((self.flying[key].replica, entry.id))
        outcome = self._recalls.copy_came(entry)
        if outcome is not None:
            self._resolve(entry, outcome, now)

    def _recall_ended(self, key: str, outcome: Outcome, now: float) -> None:
        entry = self._recalls.ended(key, outcome)
        if entry is not None:
            self._resolve(entry, outcome, now)

    def _resolve(self, entry: Entry, outcome: Outcome, now: float) -> None:
        if outcome is Outcome.QUEUE:
            self._queue(entry.again(), now)
        elif outcome is Outcome.DROP:
            self.refusals.append(Refusal(entry, None))
        else:
            replica = entry.taken_from
            lost = Lost(id=entry.id, attempt=entry.attempt, replica=replica, preempted=True)
            self.refusals.append(Refusal(entry, lost))

    # ------------------------------------------------------------ corrections

    def reconcile(self, replica: str, present: set[str], asked: float, now: float) -> int:
        """Compare with a replica's stream as it was at ``asked``; returns how many had left.

        What was released just before may not have been in the stream yet: see ``comparable``.
        """
        before = asked - FLUSH_SECONDS
        gone = [
            key
            for key, flight in self.flying.items()
            if flight.replica == replica and flight.released < before and key not in present
        ]
        for key in gone:
            self.finish(_ended(key, replica, "lost"), now)
        return len(gone)

    def comparable(self, replica: str, asked: float) -> bool:
        """Whether all that is in flight there must have been in its stream at ``asked``."""
        before = asked - FLUSH_SECONDS
        return all(f.released < before for f in self.flying.values() if f.replica == replica)

    def cancel(self, request_id: str, now: float) -> None:
        """Its client is gone: drop what waits and what is still to come, tell the replica."""
        self._cancelled.add(request_id)
        for key in list(self._keys.get(request_id, ())):
            entry = self.waiting.get(key)
            if entry is not None:
                self.policy.on_cancel(key, now)
                self._forget(key)
                self.refusals.append(Refusal(entry, None))
            elif (flight := self.flying.get(key)) is not None:
                self.cancels.append((flight.replica, request_id))
                if key in self._recalls:
                    self._recall_ended(key, Outcome.DROP, now)

    def drop_gateway(self, gateway: str, now: float) -> None:
        """Nobody waits for the requests of this gateway any more."""
        held = [*self.waiting.values(), *(flight.entry for flight in self.flying.values())]
        for request_id in dict.fromkeys(e.id for e in held if e.gateway == gateway):
            self.cancel(request_id, now)

    def _forget(self, key: str) -> None:
        self.waiting.pop(key, None)
        self._came.pop(key, None)
        request_id = id_of(key)
        keys = self._keys.get(request_id)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._keys[request_id]

    # ------------------------------------------------------------ replicas

    def see(self, view: ReplicaView, now: float) -> None:
        """A replica is new or changed."""
        before = self.replicas.get(view.id)
        self.replicas[view.id] = view
        self._credit.see(view, now)
        self.policy.on_replica(view, now)
        if before is None or (before.context, before.kv_total) != (view.context, view.kv_total):
            self._room_changed = True

    def refuse_misfits(self, now: float) -> None:
        """Called once all that happened is entered: a replica that comes back is not missed."""
        if not self._room_changed:
            return
        self._room_changed = False
        for entry in list(self.waiting.values()):
            why = lacking(self.model, self.replicas.values(), entry.request)
            if why is not None:
                self.policy.on_cancel(entry.key, now)
                self._forget(entry.key)
                self.refusals.append(misfit(entry, why))

    def gone(self, replica: str, now: float) -> None:
        """A replica died, stopped or came back as another incarnation."""
        self.replicas.pop(replica, None)
        self.policy.on_replica_gone(replica, now)
        for key in [k for k, f in self.flying.items() if f.replica == replica]:
            del self.flying[key]
            self._forget(key)
            if key in self._recalls:  # its gateway is told by the one who buries the replica
                self._recall_ended(key, Outcome.DROP, now)
        self._credit.gone(replica, now)
        self._room_changed = True

    def restore(self, replica: str, entries: list[Entry], released: float, now: float) -> None:
        """After a restart: these lie in the replica's stream already."""
        fresh = [e for e in entries if e.key not in self.flying]
        for entry in fresh:
            self._fly(entry.key, Flight(entry, replica, released), now)
            self._keys.setdefault(entry.id, set()).add(entry.key)
        self.policy.restore(replica, [e.request for e in fresh], now)


def _ended(key: str, replica: str, reason: str) -> Completion:
    return Completion(id=key, replica=replica, output_tokens=0, reason=reason)
