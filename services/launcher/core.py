"""The launcher's decisions, one tick at a time: idle detection, sessions, leaving, rolling back.

Source: CoLLM (arXiv 2604.16400). Pure: told once a tick what was seen, it returns decisions;
it knows no Redis and no clock, so the simulator and the tests run the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.launcher import gathering, idle
from services.launcher.books import Books
from services.launcher.gathering import Holder, Proposal, Waiting
from services.launcher.terms import (
    COMBINED,
    IDLE,
    SERVING,
    Back,
    Decision,
    Join,
    Leave,
    Options,
    Seen,
    SessionSeen,
    ToIdle,
)


class Launcher:
    """Of one cluster. ``tick`` is called every ``options.tick`` seconds."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._books = Books(options)
        self._waiting: dict[str, float] = {}  # adapter -> since
        self._groups: dict[str, frozenset[str]] = {}  # adapter -> Idle replicas that wait for it
        self._told: dict[str, str] = {}  # adapter -> what it was last said to wait for
        self._left: set[tuple[str, str]] = set()  # (session, dedicated replica that converged)

    def rate(self, base: str) -> float:
        """lambda-hat, arrivals per second; see ``Books``."""
        return self._books.rate(base)

    def tick(
        self,
        replicas: Sequence[Seen],
        arrivals: Mapping[str, float],
        sessions: Sequence[SessionSeen],
        now: float,
    ) -> list[Decision]:
        """All decisions of this tick. ``arrivals`` are requests a base in this tick."""
        self._books.note(replicas, arrivals)
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
        holders = [_holder(r) for r in replicas if self._may_train(r.id)]
        joins = self._joining(holders, free, sessions)
        free -= {j.replica for j in joins}
        busy = frozenset(s.adapter for s in sessions)
        self._begin_waiting(holders, busy, now)
        idle_now = self._idling(base, replicas, holders, free, busy, now)
        free |= {d.replica for d in idle_now}
        gathered = self._gathering(base, holders, free, busy, len(holders), now)
        taken = {c for p in gathered if isinstance(p, Proposal) for c in p.clients}
        back = self._rolling_back(base, replicas, free - taken)
        return [*joins, *idle_now, *gathered, *back]

    def _may_train(self, replica: str) -> bool:
        return not self._options.dedicated or replica in self._options.dedicated

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
        if self._options.dedicated:
            apart = [r.id for r in replicas if r.state == SERVING and self._may_train(r.id)]
            return [ToIdle(replica=name, why={"dedicated": "it only trains"}) for name in apart]
        window_length, _ = self._books.lengths(base)
        candidates = []
        for seen in replicas:
            load = self._books.load(seen.id, window_length)
            if seen.state == SERVING and load is not None:
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
                completes[candidate.id] = sum(self._books.training_rate(by_id[m]) for m in members)
        verdicts = idle.judge(
            candidates,
            self._books.capacities(dispatchable),
            floors=self._options.floors,
            rate=self._books.rate(base),
            headroom=self._options.headroom,
            guarded=self._options.rule == "guarded",
            completes=completes,
        )
        return [
            ToIdle(replica=v.id, why={**v.why, "T": float(window_length)})
            for v in verdicts
            if v.idle
        ]

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
            self._books.begin_idle(members)
        self._groups[waiting.adapter] = members

    def _joining(
        self, holders: Sequence[Holder], free: frozenset[str], sessions: Sequence[SessionSeen]
    ) -> list[Join]:
        joins, taken = [], set[str]()
        for session in sorted(sessions, key=lambda s: s.id):
            for holder in holders:
                fits = holder.base == session.base and holder.data.get(session.adapter, 0) > 0
                done = (session.id, holder.id) in self._left or holder.id in taken
                if session.open and fits and holder.id in free and not done:
                    taken.add(holder.id)
                    why: dict[str, float | str] = {
                        "samples": float(holder.data[session.adapter]),
                        "adapter": session.adapter,
                    }
                    joins.append(Join(session=session.id, replica=holder.id, why=why))
        return joins

    def _leaving(self, replicas: Sequence[Seen], sessions: Sequence[SessionSeen]) -> list[Leave]:
        o, by_id, leaves = self._options, {r.id: r for r in replicas}, list[Leave]()
        self._left = {(s, r) for s, r in self._left if s in {x.id for x in sessions}}
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
                    if client in o.dedicated:  # Idle again at once, it would be back at once
                        self._left.add((session.id, client))
                elif client in by_id and self._long_suspended(by_id[client]):
                    why = {"suspended_ticks": float(self._books.suspended_ticks(client))}
                    leaves.append(Leave(session=session.id, replica=client, why=why))
        return leaves

    def _long_suspended(self, seen: Seen) -> bool:
        """Load has kept its training at B = 0 for T' ticks: it had better serve alone."""
        return (
            seen.id not in self._options.dedicated
            and self._books.suspended_ticks(seen.id) >= self._books.lengths(seen.base)[1]
        )

    def _rolling_back(
        self, base: str, replicas: Sequence[Seen], free: frozenset[str]
    ) -> list[Back]:
        _, patience = self._books.lengths(base)
        return [
            Back(
                replica=r.id,
                why={"idle_ticks": float(self._books.idle_ticks(r.id)), "T_back": float(patience)},
            )
            for r in replicas
            if r.id in free
            and r.state == IDLE
            and r.id not in self._options.dedicated
            and self._books.idle_ticks(r.id) >= patience
        ]


def _holder(seen: Seen) -> Holder:
    return Holder(
        id=seen.id, base=seen.base, quality=seen.quality, data=seen.data, fresh=seen.fresh
    )
