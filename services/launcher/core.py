"""The launcher's decisions, one tick at a time: idle detection, sessions, leaving, rolling back.

Source: CoLLM (arXiv 2604.16400). Pure: told once a tick what was seen, it returns decisions;
it knows no Redis and no clock, so the simulator and the tests run the same object.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from services.launcher import gathering, idle
from services.launcher.gathering import Holder, Proposal, Rules, Waiting
from services.launcher.windows import Load, LoadWindow, length, volatility

SERVING, IDLE, COMBINED = "serving", "idle", "combined"
ARRIVAL_TICKS = 60  # ticks over which lambda-hat and the volatility are taken
RATE_FLOOR = 1 / 60  # requests per second; lambda-hat is never taken lower
LEAST_UTILISATION = 0.05  # for estimating a capacity from what a replica did


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Names and defaults as in the table of symbols; lengths in ticks."""

    tick: float = 1.0  # Delta, seconds
    t0: int = 30
    t_min: int = 10
    t_max: int = 120
    t_back0: int = 30  # T'0
    decay: float = 0.1
    floors: idle.Floors = idle.Floors()
    headroom: float = 0.2
    rule: str = "guarded"  # "paper" | "guarded"
    min_participants: int = 3
    max_wait: float = 300.0
    least_fall: float = 0.005  # delta
    patience: int = 2

    @property
    def rules(self) -> Rules:
        return Rules(min_participants=self.min_participants, max_wait=self.max_wait)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One live replica at this tick."""

    id: str
    base: str
    state: str
    load: Load | None = None  # of this tick; None: it sent no sample
    rate: float | None = None  # requests/s at its present (b*, B); None: no latency model
    rate_training: float | None = None  # requests/s at b*(B0)
    finished: float = 0.0  # requests it finished in this tick
    quality: float = 1.0
    data: Mapping[str, int] = {}
    fresh: Mapping[str, int] = {}
    suspended: bool = False  # Combined, but the load left it B = 0


class SessionSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A session that runs: its members and the losses of their rounds."""

    id: str
    adapter: str
    base: str
    clients: tuple[str, ...]
    losses: Mapping[str, Sequence[float]] = {}  # client -> local loss by round
    open: bool = True  # new members may join at the next round


class ToIdle(msgspec.Struct, frozen=True, kw_only=True):
    """Serving -> Idle."""

    replica: str
    why: Mapping[str, float | str]


class Back(msgspec.Struct, frozen=True, kw_only=True):
    """Idle -> Serving: not selected for T' ticks."""

    replica: str
    why: Mapping[str, float | str]


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A newly Idle replica with data joins a session at its next round."""

    session: str
    replica: str
    why: Mapping[str, float | str]


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """A client leaves its session and serves again."""

    session: str
    replica: str
    why: Mapping[str, float | str]


Decision = ToIdle | Back | Proposal | Join | Leave | Waiting


class Launcher:
    """Books of one cluster. ``tick`` is called every ``options.tick`` seconds."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._windows: dict[str, LoadWindow] = {}
        self._states: dict[str, str] = {}
        self._idle_ticks: dict[str, int] = {}
        self._suspended_ticks: dict[str, int] = {}
        self._arrivals: dict[str, deque[float]] = {}
        self._throughput: dict[str, deque[float]] = {}
        self._waiting: dict[str, float] = {}  # adapter -> since
        self._groups: dict[str, frozenset[str]] = {}  # adapter -> Idle replicas that wait for it
        self._told: dict[str, str] = {}  # adapter -> what it was last said to wait for

    def rate(self, base: str) -> float:
        """lambda-hat: arrivals per second, EWMA over the last minute, at least the floor."""
        arrivals = self._arrivals.get(base)
        if not arrivals:
            return RATE_FLOOR
        ages = range(len(arrivals) - 1, -1, -1)
        weights = [math.exp(-self._options.decay * age) for age in ages]
        mean = sum(w * a for w, a in zip(weights, arrivals, strict=True)) / sum(weights)
        return max(RATE_FLOOR, mean / self._options.tick)

    def lengths(self, base: str) -> tuple[int, int]:
        """(T, T') in ticks at the present volatility of arrivals."""
        o, cv = self._options, volatility(self._arrivals.get(base, ()))
        return length(o.t0, cv, o.t_min, o.t_max), length(o.t_back0, cv, o.t_min, o.t_max)

    def tick(
        self,
        replicas: Sequence[Seen],
        arrivals: Mapping[str, float],
        sessions: Sequence[SessionSeen],
        now: float,
    ) -> list[Decision]:
        """All decisions of this tick. ``arrivals`` are requests a base in this tick."""
        self._note(replicas, arrivals)
        decisions: list[Decision] = [*self._leaving(replicas, sessions)]
        for base in sorted({r.base for r in replicas}):
            own = [r for r in replicas if r.base == base]
            decisions += self._of_base(base, own, sessions, now)
        return decisions

    def _of_base(
        self, base: str, replicas: Sequence[Seen], sessions: Sequence[SessionSeen], now: float
    ) -> list[Decision]:
        members = {c for s in sessions for c in s.clients}
        free = frozenset(r.id for r in replicas if r.state == IDLE and r.id not in members)
        holders = [_holder(r) for r in replicas]
        joins = self._joining(holders, free, sessions)
        free -= {j.replica for j in joins}
        busy = frozenset(s.adapter for s in sessions)
        self._begin_waiting(holders, busy, now)
        idle_now = self._idling(base, replicas, holders, free, busy, now)
        free |= {d.replica for d in idle_now}
        gathered = self._gathering(base, holders, free, busy, len(replicas), now)
        taken = {c for p in gathered if isinstance(p, Proposal) for c in p.clients}
        back = self._rolling_back(base, replicas, free - taken)
        return [*joins, *idle_now, *gathered, *back]

    # ------------------------------------------------------------ books

    def _note(self, replicas: Sequence[Seen], arrivals: Mapping[str, float]) -> None:
        for base, count in arrivals.items():
            self._arrivals.setdefault(base, deque(maxlen=ARRIVAL_TICKS)).append(count)
        gone = self._states.keys() - {r.id for r in replicas}
        for name in gone:
            for book in (
                self._states,
                self._windows,
                self._idle_ticks,
                self._throughput,
                self._suspended_ticks,
            ):
                book.pop(name, None)
        for seen in replicas:
            self._note_one(seen)

    def _note_one(self, seen: Seen) -> None:
        o = self._options
        window = self._windows.setdefault(seen.id, LoadWindow(o.t_max, o.decay))
        if self._states.get(seen.id) != seen.state:
            window.clear()
            self._idle_ticks[seen.id] = self._suspended_ticks[seen.id] = 0
            self._states[seen.id] = seen.state
        if seen.state == SERVING and seen.load is not None:
            window.add(seen.load)
        self._idle_ticks[seen.id] += seen.state == IDLE
        suspended = seen.state == COMBINED and seen.suspended
        self._suspended_ticks[seen.id] = self._suspended_ticks[seen.id] + 1 if suspended else 0
        done = self._throughput.setdefault(seen.id, deque(maxlen=o.t0))
        done.append(seen.finished)

    # ------------------------------------------------------------ idle detection

    def _idling(
        self,
        base: str,
        replicas: Sequence[Seen],
        holders: Sequence[Holder],
        free: frozenset[str],
        busy: frozenset[str],
        now: float,
    ) -> list[ToIdle]:
        window_length, _ = self.lengths(base)
        candidates = []
        for seen in replicas:
            load = self._windows[seen.id].mean(window_length)
            full = len(self._windows[seen.id]) >= window_length
            if seen.state == SERVING and full and load is not None:
                candidates.append(idle.Candidate(id=seen.id, load=load))
        dispatchable = [r for r in replicas if r.state in (SERVING, COMBINED)]
        by_id = {r.id: r for r in replicas}
        completes = {}
        for candidate in candidates:
            members = gathering.completing(
                candidate.id,
                holders,
                free,
                self._waiting,
                busy,
                {base: len(replicas)},
                self._options.rules,
                now,
            )
            if members is not None:
                completes[candidate.id] = sum(self._training_rate(by_id[m]) for m in members)
        verdicts = idle.judge(
            candidates,
            self._capacities(dispatchable),
            floors=self._options.floors,
            rate=self.rate(base),
            headroom=self._options.headroom,
            guarded=self._options.rule == "guarded",
            completes=completes,
        )
        return [
            ToIdle(replica=v.id, why={**v.why, "T": float(window_length)})
            for v in verdicts
            if v.idle
        ]

    def _capacities(self, dispatchable: Sequence[Seen]) -> list[idle.Capacity]:
        """One a replica; a replica of which nothing is known counts like the others' mean."""
        rates = {r.id: self._capacity(r) for r in dispatchable}
        known = [rate for rate in rates.values() if not math.isinf(rate)]
        usual = sum(known) / len(known) if known else math.inf
        return [
            idle.Capacity(id=name, rate=usual if math.isinf(rate) else rate)
            for name, rate in rates.items()
        ]

    def _capacity(self, seen: Seen) -> float:
        """Requests per second: by its latency model, else by what it did at its utilisation."""
        if seen.rate is not None:
            return seen.rate
        done, window = self._throughput.get(seen.id), self._windows[seen.id]
        load = window.mean(len(window)) if len(window) else None
        if load is None or load.utilisation < self._options.floors.utilisation:
            return math.inf  # hardly anything is asked of it: nothing is known against it
        if not done:
            return 0.0
        per_second = sum(done) / len(done) / self._options.tick
        return per_second / max(load.utilisation, LEAST_UTILISATION)

    def _training_rate(self, seen: Seen) -> float:
        return self._capacity(seen) / 2 if seen.rate_training is None else seen.rate_training

    # ------------------------------------------------------------ sessions

    def _begin_waiting(self, holders: Sequence[Holder], busy: frozenset[str], now: float) -> None:
        wanting = {a for h in holders for a, n in h.fresh.items() if n > 0 and a not in busy}
        for adapter in wanting:
            self._waiting.setdefault(adapter, now)
        held = {a for h in holders for a in h.data}
        for adapter in (self._waiting.keys() & held) - wanting:
            del self._waiting[adapter]
            self._told.pop(adapter, None)
            self._groups.pop(adapter, None)

    def _gathering(
        self,
        base: str,
        holders: Sequence[Holder],
        free: frozenset[str],
        busy: frozenset[str],
        live: int,
        now: float,
    ) -> list[Proposal | Waiting]:
        """Sessions to start; waiting is told once for each change of what is missing."""
        found = gathering.gather(
            holders, free, self._waiting, busy, {base: live}, self._options.rules, now
        )
        out: list[Proposal | Waiting] = []
        for result in found:
            if isinstance(result, Waiting):
                self._keep_together(result)
                if self._told.get(result.adapter) == result.why:
                    continue
                self._told[result.adapter] = result.why
            else:
                self._told.pop(result.adapter, None)
                self._waiting.pop(result.adapter, None)
                self._groups.pop(result.adapter, None)
            out.append(result)
        return out

    def _keep_together(self, waiting: Waiting) -> None:
        """A group that grows starts its patience anew, all members at once.

        Otherwise replicas that went Idle at different moments would go back one by one, and a
        cluster without any load might never see enough of them Idle together.
        """
        before = self._groups.get(waiting.adapter, frozenset())
        members = frozenset(waiting.idle)
        if members - before:
            for member in members:
                self._idle_ticks[member] = 0
        self._groups[waiting.adapter] = members

    def _joining(
        self, holders: Sequence[Holder], free: frozenset[str], sessions: Sequence[SessionSeen]
    ) -> list[Join]:
        joins, taken = [], set[str]()
        for session in sorted(sessions, key=lambda s: s.id):
            for holder in holders:
                fits = holder.base == session.base and holder.data.get(session.adapter, 0) > 0
                if session.open and fits and holder.id in free and holder.id not in taken:
                    taken.add(holder.id)
                    why: dict[str, float | str] = {
                        "samples": float(holder.data[session.adapter]),
                        "adapter": session.adapter,
                    }
                    joins.append(Join(session=session.id, replica=holder.id, why=why))
        return joins

    def _leaving(self, replicas: Sequence[Seen], sessions: Sequence[SessionSeen]) -> list[Leave]:
        o, by_id, leaves = self._options, {r.id: r for r in replicas}, list[Leave]()
        for session in sessions:
            for client in session.clients:
                losses = session.losses.get(client, ())
                if gathering.converged(losses, o.least_fall, o.patience):
                    why: dict[str, float | str] = {
                        "converged": f"loss fell less than {o.least_fall} for {o.patience} rounds",
                        "loss": round(losses[-1], 4),
                        "best_before": round(min(losses[: -o.patience]), 4),
                    }
                    leaves.append(Leave(session=session.id, replica=client, why=why))
                elif client in by_id and self._long_suspended(by_id[client]):
                    why = {"suspended_ticks": float(self._suspended_ticks[client])}
                    leaves.append(Leave(session=session.id, replica=client, why=why))
        return leaves

    def _long_suspended(self, seen: Seen) -> bool:
        """Load has kept its training at B = 0 for T' ticks: it had better serve alone."""
        return self._suspended_ticks.get(seen.id, 0) >= self.lengths(seen.base)[1]

    def _rolling_back(
        self, base: str, replicas: Sequence[Seen], free: frozenset[str]
    ) -> list[Back]:
        _, patience = self.lengths(base)
        return [
            Back(
                replica=r.id,
                why={"idle_ticks": float(self._idle_ticks[r.id]), "T_back": float(patience)},
            )
            for r in replicas
            if r.id in free and r.state == IDLE and self._idle_ticks[r.id] >= patience
        ]


def _holder(seen: Seen) -> Holder:
    return Holder(
        id=seen.id, base=seen.base, quality=seen.quality, data=seen.data, fresh=seen.fresh
    )
