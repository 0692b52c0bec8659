"""What the dashboard remembers: plain data in, bounded memory, no I/O. Redis seconds throughout."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from collm.dashboard.buckets import Buckets
from shared.adapters import Adapter, AdapterVersion
from shared.demand import ModelDemand
from shared.messages import StepSample, TrainSample
from shared.records import ModelCard, ReplicaRecord
from shared.replica_state import DISPATCHABLE
from shared.sessions import Session

K = TypeVar("K")
V = TypeVar("V")

WIDTH = 2.0  # seconds of a slice
EVENTS = 1000  # events kept for the list
MOVES = 500  # state changes kept of a replica
STEPS = 400  # training steps kept of a client
ROUNDS = 500
RECENT = 30  # slices kept of a single replica's batch
KEYS = 256  # replicas, clients or sessions remembered at most


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What lay in Redis at one moment."""

    time: float
    replicas: tuple[ReplicaRecord, ...] = ()
    alive: frozenset[str] = frozenset()  # replicas with a heartbeat
    models: tuple[ModelCard, ...] = ()
    queued: dict[str, int] = {}  # model -> requests not released yet
    demand: dict[str, ModelDemand] = {}
    sessions: tuple[Session, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    versions: dict[str, tuple[AdapterVersion, ...]] = {}  # adapter -> oldest first


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the audit log."""

    id: str
    time: float
    kind: str
    fields: dict[str, str]


class Move(msgspec.Struct, frozen=True):
    """A replica's change of state."""

    time: float
    before: str
    to: str
    by: str
    why: str


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A finished federated round. Losses in nats per token."""

    time: float
    session: str
    adapter: str
    round: int
    loss: float | None
    heldout: float | None
    promoted: bool


class History:
    """Everything the views are made from. One writer, any number of readers, one event loop."""

    def __init__(self, seconds: float = 3600.0) -> None:
        keep = int(seconds / WIDTH)
        self.seconds = seconds
        self.snapshot = Snapshot(time=0.0)
        self.rates = Buckets(WIDTH, keep)  # tokens, finished; met, missed of gateways
        self.levels = Buckets(WIDTH, keep)  # queued, in flight, ideal: sums and counts
        self.batches: OrderedDict[str, Buckets] = OrderedDict()  # replica -> b x seconds, seconds
        self.moves: OrderedDict[str, deque[Move]] = OrderedDict()
        self.steps: OrderedDict[tuple[str, str], deque[TrainSample]] = OrderedDict()
        self.sessions: OrderedDict[str, Session] = OrderedDict()  # running, and ended ones
        self.rounds: deque[Round] = deque(maxlen=ROUNDS)
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.emulated = False  # whether any sample came from an emulated engine
        self.away: str | None = "not connected yet"  # why Redis gives no answer
        self.gateways: dict[str, str | None] = {}  # address -> why it gives no answer
        self.damaged = 0  # records and messages that could not be read
        self._counters: dict[str, tuple[float, float]] = {}
        self.changes = 0  # grows with everything taken in

    # ------------------------------------------------------------ taking in

    def take_snapshot(self, now: Snapshot) -> None:
        """The state of the cluster at ``now.time``."""
        self.snapshot = now
        self.changes += 1
        ready = [r for r in now.replicas if r.state in DISPATCHABLE]
        ideal = [r.b_star for r in ready if r.b_star > 0]
        self.levels.add(
            now.time,
            looks=1,
            queued=sum(now.queued.values()),
            in_flight=sum(r.in_flight for r in now.replicas),
            ideal=sum(ideal),
            ideals=len(ideal),
        )
        for session in now.sessions:
            _remember(self.sessions, session.id, session)

    def take_event(self, entry_id: str, fields: Mapping[str, str]) -> None:
        """An entry of the audit log, oldest first."""
        time = entry_time(entry_id)
        rest = {k: v for k, v in fields.items() if k not in ("kind", "time") and v != ""}
        event = Event(id=entry_id, time=time, kind=fields.get("kind", "?"), fields=rest)
        self.events.append(event)
        self.changes += 1
        if event.kind == "state" and "replica" in rest:
            moves = _remember(self.moves, rest["replica"], deque(maxlen=MOVES), keep_old=True)
            get = rest.get
            moves.append(Move(time, get("from", ""), get("to", ""), get("by", ""), get("why", "")))
        elif event.kind == "round_done":
            self.rounds.append(_round(event))

    def take_step(self, entry_id: str, sample: StepSample) -> None:
        """One engine step or several merged ones of a replica."""
        time = entry_time(entry_id)
        self.emulated |= sample.emulated
        self.rates.add(time, tokens=sample.decode_tokens, finished=len(sample.finished))
        mine = _remember(self.batches, sample.replica, Buckets(WIDTH, RECENT), keep_old=True)
        mine.add(time, requests=sample.b * sample.seconds, seconds=sample.seconds)
        self.levels.add(time, requests=sample.b * sample.seconds, seconds=sample.seconds)
        self.changes += 1

    def take_training(self, sample: TrainSample) -> None:
        """One optimiser step of a client."""
        key = (sample.adapter, sample.replica)
        _remember(self.steps, key, deque(maxlen=STEPS), keep_old=True).append(sample)
        self.changes += 1

    def take_gateway(self, address: str, time: float, met: float, missed: float) -> None:
        """A gateway's counters of ended requests that named a limit.

        The first reading is the baseline; counters that fell are those of a restarted process.
        """
        before = self._counters.get(address)
        self._counters[address] = (met, missed)
        self.gateways[address] = None
        if before is None:
            self.rates.add(time, met=0, missed=0, readings=1)
            return
        if met < before[0] or missed < before[1]:
            before = (0.0, 0.0)
        self.rates.add(time, met=met - before[0], missed=missed - before[1], readings=1)
        self.changes += 1

    def forget_gateway(self, address: str) -> None:
        """It is not there any more, or goes by other addresses."""
        self.gateways.pop(address, None)
        self._counters.pop(address, None)

    def take_silence(self, address: str, why: str) -> None:
        """A gateway that gave no answer."""
        self.gateways[address] = why
        self.changes += 1

    def take_absence(self, why: str | None) -> None:
        """Redis is away, with the reason; or answers again (None)."""
        if why != self.away:
            self.away = why
            self.changes += 1

    @property
    def any_emulated(self) -> bool:
        """Whether anything shown comes from an engine that computes nothing."""
        now = self.snapshot
        return (
            self.emulated
            or any(m.emulated for m in now.models)
            or any(r.engine == "emulated" for r in now.replicas)
        )


def entry_time(entry_id: str) -> float:
    """Seconds at which Redis took an entry."""
    return int(entry_id.partition("-")[0]) / 1e3


def _remember(store: OrderedDict[K, V], key: K, value: V, *, keep_old: bool = False) -> V:
    """Put (or keep) a value under a key; the longest untouched ones make room."""
    if not keep_old or key not in store:
        store[key] = value
    store.move_to_end(key)
    while len(store) > KEYS:
        store.popitem(last=False)
    return store[key]


def _round(event: Event) -> Round:
    fields = event.fields
    return Round(
        time=event.time,
        session=fields.get("session", ""),
        adapter=fields.get("adapter", ""),
        round=int(_number(fields.get("round")) or 0),
        loss=_number(fields.get("loss")),
        heldout=_number(fields.get("heldout")),
        promoted=fields.get("promoted") == "yes",
    )


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
