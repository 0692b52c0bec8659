"""What each part of the page shows, as plain data made from a History. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from collm.dashboard.history import Event, History, Move
from shared.records import ReplicaRecord
from shared.replica_state import DISPATCHABLE

POINTS = 150  # of a curve
LATELY = 10.0  # seconds that "now" means for rates and batch sizes
CURVES = 8  # curves of a chart at most; more cannot be told apart
SESSIONS = 6

Point = tuple[float, float | None]  # Redis seconds, value (None: not known)


class Tile(msgspec.Struct, frozen=True):
    """One number at the top."""

    label: str
    value: str
    hint: str = ""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in one state. ``left`` and ``width`` are shares of the window."""

    state: str
    left: float
    width: float
    start: float
    end: float
    why: str = ""
    by: str = ""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's row: what it is now and its states over the window."""

    replica: str
    model: str
    state: str
    silent: bool  # no heartbeat, and the state does not say so
    b: float  # mean batch of the last seconds, while it computed
    limit: int
    ideal: int  # b*; 0: not known
    micro_batch: int
    in_flight: int
    kv: float | None  # share of the KV memory in use
    segments: tuple[Segment, ...]


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second over time."""

    tokens: list[Point]
    finished: list[Point]
    goodput: list[Point]
    ended: list[Point]
    attainment: list[Point]  # 0 to 1


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """Queue and batch sizes over time."""

    queued: list[Point]
    in_flight: list[Point]
    batch: list[Point]
    ideal: list[Point]


class AdapterRow(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter and its common versions, oldest first: (round, Q, promoted, version)."""

    name: str
    base: str
    tenant: str
    current: str
    quality: float
    heldout: float | None
    rank: int
    serving: int  # replicas whose record names its current version
    versions: tuple[tuple[int, float, bool, str], ...]


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A federated session and its curves. Losses in nats per token."""

    id: str
    adapter: str
    phase: str
    round: int
    done: int
    clients: tuple[str, ...]
    micro_batches: dict[str, int]
    why: str
    ended: str
    remaining: float | None  # seconds until the deadline of local training
    steps: dict[str, list[Point]]  # client -> loss of its optimiser steps
    loss: list[Point]  # F after each round
    heldout: list[Point]


def tiles(history: History, now: float) -> list[Tile]:
    """The numbers at the top."""
    snap = history.snapshot
    ready = sum(r.state in DISPATCHABLE for r in snap.replicas)
    training = sum(r.state in ("idle", "combined") for r in snap.replicas)
    tokens, finished = _lately(history, now)
    minute = history.rates.grouped(now - 60, now, 30)
    met = sum(g[2]["met"] for g in minute)
    named = met + sum(g[2]["missed"] for g in minute)
    seconds = sum(g[1] for g in minute if g[2]["readings"]) or 1.0
    found = [
        Tile("replicas ready", f"{ready} / {len(snap.replicas)}", f"{training} idle or training"),
        Tile("waiting", str(sum(snap.queued.values())), "requests not released yet"),
        *_arrivals(history),
        Tile("in flight", str(sum(r.in_flight for r in snap.replicas)), "on replicas"),
        Tile("tokens / s", f"{tokens:.0f}", f"last {LATELY:.0f} s"),
        Tile("answers / s", f"{finished:.1f}", f"last {LATELY:.0f} s"),
    ]
    if any(why is None for why in history.gateways.values()):
        share = f"{100 * met / named:.1f} %" if named else "–"
        found.append(Tile("goodput / s", f"{met / seconds:.1f}", "in time, last minute"))
        found.append(Tile("attainment", share, f"of {named:.0f} with a limit, last minute"))
    return found


def _arrivals(history: History) -> list[Tile]:
    """Requests a second as the dispatchers see them; nothing when none has said so lately."""
    said = history.snapshot.demand.values()
    if not said:
        return []
    wait = max(d.wait_p95 for d in said)
    return [
        Tile("requests / s", f"{sum(d.rate for d in said):.1f}", f"p95 wait {1e3 * wait:.0f} ms")
    ]


def lanes(history: History, now: float, window: float) -> list[Lane]:
    """All replicas with their states between ``now - window`` and ``now``."""
    snap = history.snapshot
    return [_lane(history, r, r.id in snap.alive, now, window) for r in snap.replicas]


def _lane(history: History, r: ReplicaRecord, alive: bool, now: float, window: float) -> Lane:
    moves = history.moves.get(r.id, ())
    return Lane(
        replica=r.id,
        model=r.model,
        state=r.state or "unknown",
        silent=not alive and r.state not in ("dead", "stopped", ""),
        b=batch_of(history, r.id, now),
        limit=r.b,
        ideal=r.b_star,
        micro_batch=r.B,
        in_flight=r.in_flight,
        kv=1 - r.kv_free / r.kv_total if r.kv_total else None,
        segments=tuple(segments(moves, r, now - window, now)),
    )


def segments(
    moves: Iterable[Move], record: ReplicaRecord, start: float, end: float
) -> list[Segment]:
    """States between two moments, without gaps where they are known. Pure.

    Before the first known change the replica was in the state which that change names.
    """
    known = list(moves)
    spans: list[tuple[float, float, str, str, str]] = []
    if known and known[0].before:
        spans.append((start, known[0].time, known[0].before, "", ""))
    ends = [*(move.time for move in known[1:]), end]
    for move, until in zip(known, ends, strict=False):
        spans.append((move.time, until, move.to, move.why, move.by))
    if not known and record.state:
        spans.append((record.since or start, end, record.state, record.why, record.by))
    found = []
    for begin, until, state, why, by in spans:
        left, right = max(begin, start), min(until, end)
        if right > left:
            share = end - start
            found.append(
                Segment(
                    state=state,
                    left=(left - start) / share,
                    width=(right - left) / share,
                    start=left,
                    end=right,
                    why=why,
                    by=by,
                )
            )
    return found


def batch_of(history: History, replica: str, now: float) -> float:
    """Mean number of requests decoded together in the last seconds, while it computed."""
    buckets = history.batches.get(replica)
    if buckets is None:
        return 0.0
    groups = buckets.grouped(now - LATELY - buckets.width, now + buckets.width, 10)
    seconds = sum(g[2]["seconds"] for g in groups)
    return sum(g[2]["requests"] for g in groups) / seconds if seconds else 0.0


def rates(history: History, now: float, window: float) -> Rates:
    """Throughput, and goodput as the gateways count it."""
    first = history.rates.first
    groups = history.rates.grouped(now - window, now, POINTS)
    tokens, finished, goodput, ended, share = [], [], [], [], []
    for time, seconds, sums in groups:
        known = first is not None and time + seconds > first
        tokens.append((time, sums["tokens"] / seconds if known else None))
        finished.append((time, sums["finished"] / seconds if known else None))
        read, named = sums["readings"] > 0, sums["met"] + sums["missed"]
        goodput.append((time, sums["met"] / seconds if read else None))
        ended.append((time, named / seconds if read else None))
        share.append((time, sums["met"] / named if named else None))
    return Rates(tokens=tokens, finished=finished, goodput=goodput, ended=ended, attainment=share)


def levels(history: History, now: float, window: float) -> Levels:
    """Requests that wait, and the mean batch against the mean ideal of ready replicas."""
    queued, in_flight, batch, ideal = [], [], [], []
    for time, _, sums in history.levels.grouped(now - window, now, POINTS):
        looks = sums["looks"]
        queued.append((time, sums["queued"] / looks if looks else None))
        in_flight.append((time, sums["in_flight"] / looks if looks else None))
        seconds = sums["seconds"]
        batch.append((time, sums["requests"] / seconds if seconds else None))
        ideal.append((time, sums["ideal"] / sums["ideals"] if sums["ideals"] else None))
    return Levels(queued=queued, in_flight=in_flight, batch=batch, ideal=ideal)


def adapters(history: History) -> list[AdapterRow]:
    """All adapters, those with the newest version first."""
    snap = history.snapshot
    rows, newest = [], {}
    for adapter in snap.adapters:
        every = snap.versions.get(adapter.name, ())
        current = next((v for v in every if v.version == adapter.current), None)
        serving = [r for r in snap.replicas if r.adapters.get(adapter.name) == adapter.current]
        newest[adapter.name] = max((v.created for v in every), default=adapter.created)
        rows.append(
            AdapterRow(
                name=adapter.name,
                base=adapter.base,
                tenant=adapter.tenant,
                current=adapter.current,
                quality=adapter.quality,
                heldout=current.heldout_ce if current else None,
                rank=adapter.rank,
                serving=len(serving) if adapter.current else 0,
                versions=tuple((v.round, v.quality, v.promoted, v.version) for v in every),
            )
        )
    return sorted(rows, key=lambda r: (-newest[r.name], r.name))


def session_views(history: History, now: float) -> list[SessionView]:
    """Running sessions first, then the ones that ended last."""
    live = {s.id for s in history.snapshot.sessions}
    order = sorted(history.sessions.values(), key=lambda s: (s.id not in live, -s.created))
    return [_session(history, s.id, s.id in live, now) for s in order[:SESSIONS]]


def _session(history: History, session_id: str, live: bool, now: float) -> SessionView:
    s = history.sessions[session_id]
    rounds = [r for r in history.rounds if r.session == s.id]
    ends = [e for e in history.events if e.kind == "session_ended"]
    end = next((e for e in reversed(ends) if e.fields.get("session") == s.id), None)
    until = end.time if end else now
    steps: dict[str, list[Point]] = {}
    for (adapter, replica), samples in history.steps.items():
        mine = [m for m in samples if m.loss is not None and s.created <= m.time <= until]
        if adapter == s.adapter and mine and len(steps) < CURVES:
            steps[replica] = [(m.time, m.loss) for m in mine]
    remaining = s.deadline - now if live and s.phase == "train" and s.deadline else None
    return SessionView(
        id=s.id,
        adapter=s.adapter,
        phase=str(s.phase) if live else "ended",
        round=s.round,
        done=s.done,
        clients=s.clients,
        micro_batches=s.B,
        why=s.why,
        ended="" if live else s.ended or (end.fields.get("why", "") if end else ""),
        remaining=remaining,
        steps=dict(sorted(steps.items())),
        loss=[(r.time, r.loss) for r in rounds if r.loss is not None],
        heldout=[(r.time, r.heldout) for r in rounds if r.heldout is not None],
    )


def kinds(history: History) -> list[str]:
    """Kinds of the events kept."""
    return sorted({e.kind for e in history.events})


def events(
    history: History, wanted: Iterable[str] = (), text: str = "", count: int = 100
) -> list[Event]:
    """The newest ``count`` events of the kinds wanted (none named: all) that contain ``text``."""
    chosen, words, found = set(wanted), text.lower().split(), []
    for event in reversed(history.events):
        if chosen and event.kind not in chosen:
            continue
        line = " ".join([event.kind, *(f"{k}={v}" for k, v in event.fields.items())]).lower()
        if all(word in line for word in words):
            found.append(event)
            if len(found) == count:
                break
    return found


def _lately(history: History, now: float) -> tuple[float, float]:
    """Tokens and answers a second over the last full slices."""
    groups = history.rates.grouped(now - LATELY - history.rates.width, now, 10)
    seconds = sum(g[1] for g in groups)
    if not seconds:
        return 0.0, 0.0
    return (
        sum(g[2]["tokens"] for g in groups) / seconds,
        sum(g[2]["finished"] for g in groups) / seconds,
    )
