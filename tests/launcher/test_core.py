"""The launcher's decisions on clusters made up by hand and by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.launcher.core import Launcher
from services.launcher.gathering import Proposal, Waiting, converged
from services.launcher.idle import Candidate, Capacity, Floors, judge
from services.launcher.terms import (
    Back,
    Decision,
    Join,
    Leave,
    Options,
    Seen,
    SessionSeen,
    ToIdle,
)
from services.launcher.windows import Load

OPTIONS = Options(t0=5, t_min=3, t_max=20, t_back0=4)


def seen(name: str, state: str = "serving", u: float = 0.0, **more: Any) -> Seen:
    values: dict[str, Any] = {"load": Load(utilisation=u, queued=0.0, b=8 * u), "base": "m"}
    return Seen(id=name, state=state, **{**values, **more})


class Cluster:
    """Carries decisions out and ticks on, as the service does."""

    def __init__(self, replicas: Sequence[Seen], options: Options = OPTIONS) -> None:
        self.launcher = Launcher(options)
        self.replicas = {r.id: r for r in replicas}
        self.sessions: dict[str, SessionSeen] = {}
        self.now = 0.0
        self.log: list[Decision] = []

    def state(self, name: str) -> str:
        return self.replicas[name].state

    def set(self, name: str, **changes: Any) -> None:
        old = self.replicas[name]
        values = {f: getattr(old, f) for f in old.__struct_fields__}
        self.replicas[name] = Seen(**{**values, **changes})

    def tick(self, count: int = 1, arrivals: float = 0.0) -> list[Decision]:
        made: list[Decision] = []
        for _ in range(count):
            self.now += 1
            decisions = self.launcher.tick(
                list(self.replicas.values()),
                {"m": arrivals},
                list(self.sessions.values()),
                self.now,
            )
            for decision in decisions:
                self._carry_out(decision)
            made += decisions
        self.log += made
        return made

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case ToIdle(replica=name):
                assert self.state(name) == "serving"
                self.set(name, state="idle")
            case Back(replica=name):
                assert self.state(name) == "idle"
                self.set(name, state="serving")
            case Proposal():
                name = f"s{len(self.sessions)}"
                self.sessions[name] = SessionSeen(
                    id=name, adapter=decision.adapter, base="m", clients=decision.clients
                )
                for client in decision.clients:
                    assert self.state(client) == "idle"
                    self.set(client, state="combined")
            case Join(session=session, replica=name):
                old = self.sessions[session]
                self.sessions[session] = SessionSeen(
                    id=old.id, adapter=old.adapter, base="m", clients=(*old.clients, name)
                )
                self.set(name, state="combined")
            case Leave(session=session, replica=name):
                old = self.sessions[session]
                self.sessions[session] = SessionSeen(
                    id=old.id,
                    adapter=old.adapter,
                    base="m",
                    clients=tuple(c for c in old.clients if c != name),
                )
                self.set(name, state="serving")
            case Waiting():
                pass


def of(kind: type, decisions: Sequence[Decision]) -> list[Any]:
    return [d for d in decisions if isinstance(d, kind)]


DATA: Mapping[str, int] = {"chat": 100}


def test_three_idle_replicas_with_data_start_a_session_with_the_best_as_server() -> None:
    cluster = Cluster(
        [
            seen(f"r{i}", data=DATA, fresh=DATA, rate=10.0, rate_training=5.0, quality=q)
            for i, q in enumerate((1.0, 2.0, 2.0))
        ]
    )
    made = cluster.tick(8)
    proposals = of(Proposal, made)
    assert len(proposals) == 1
    assert proposals[0].clients == ("r0", "r1", "r2")
    assert proposals[0].server == "r1"
    assert len(of(ToIdle, made)) == 3


def test_no_replica_goes_idle_before_its_window_is_full() -> None:
    cluster = Cluster([seen(f"r{i}") for i in range(3)])
    assert of(ToIdle, cluster.tick(4)) == []
    assert of(ToIdle, cluster.tick(1)) != []


def test_of_unequal_replicas_the_idlest_goes_and_the_busy_stay() -> None:
    cluster = Cluster(
        [seen("r0", u=0.9, finished=1), seen("r1", u=0.95, finished=1), seen("r2", u=0.0)]
    )
    gone = {d.replica for d in of(ToIdle, cluster.tick(8, arrivals=1.5))}
    assert gone == {"r2"}


def test_the_guard_keeps_what_the_load_needs_and_the_papers_rule_does_not() -> None:
    def idled(rule: str) -> set[str]:
        options = Options(t0=5, t_min=3, t_max=20, t_back0=100, rule=rule)
        light = Load(utilisation=0.2, queued=0.0, b=0.5)
        cluster = Cluster([seen(f"r{i}", load=light, rate=1.7) for i in range(3)], options)
        return {d.replica for d in of(ToIdle, cluster.tick(12, arrivals=3.0))}

    assert idled("guarded") == set()  # 1.2 x 3 requests/s need three of 1.7
    assert len(idled("paper")) == 3


def test_the_last_dispatchable_replica_stays_unless_it_completes_a_session() -> None:
    lonely = Cluster([seen("r0", rate=100.0)])
    assert of(ToIdle, lonely.tick(20)) == []
    trainer = Cluster([seen("r0", rate=100.0, rate_training=50.0, data=DATA, fresh=DATA)])
    made = trainer.tick(20)
    assert len(of(ToIdle, made)) == 1  # a cluster of one: min_participants is at most N
    assert of(Proposal, made)[0].clients == ("r0",)


def test_an_idle_replica_that_nobody_selects_serves_again_after_t_back() -> None:
    cluster = Cluster(
        [seen("r0", u=0.9, finished=1), seen("r1", u=0.9, finished=1), seen("r2", u=0.0)]
    )
    cluster.tick(5, arrivals=1.5)
    assert cluster.state("r2") == "idle"
    made = cluster.tick(4, arrivals=1.5)
    back = of(Back, made)
    assert [d.replica for d in back] == ["r2"]
    assert back[0].why == {"idle_ticks": 4.0, "T_back": 4.0}
    assert of(ToIdle, cluster.tick(4, arrivals=1.5)) == []  # its window starts anew
    assert len(of(ToIdle, cluster.tick(1, arrivals=1.5))) == 1


def test_too_few_replicas_with_data_are_told_why_they_wait_and_train_alone_in_the_end() -> None:
    """flower#4147: a server that waits for its minimum of clients for ever."""
    options = Options(t0=3, t_min=3, t_max=20, t_back0=3, max_wait=20.0)
    cluster = Cluster(
        [
            seen("r0", data=DATA, fresh=DATA, rate=9.0, rate_training=9.0),
            seen("r1", u=0.9, rate=9.0),
            seen("r2", u=0.9, rate=9.0),
        ],
        options,
    )
    made = cluster.tick(19)
    waiting = of(Waiting, made)
    assert of(Proposal, made) == []
    assert "needs 3 Idle replicas with data for it, has 0; only 1 of the live" in waiting[0].why
    assert len({w.why for w in waiting}) <= 3  # told when it changes, not every tick
    made = cluster.tick(8)
    proposal = of(Proposal, made)[0]
    assert proposal.clients == ("r0",)
    assert "waited" in proposal.why


def test_replicas_that_became_idle_at_different_moments_still_come_together() -> None:
    """Each went back to Serving before the last became Idle, in turns and for ever."""
    quick = Options(t0=4, t_min=4, t_max=4, t_back0=4)
    cluster = Cluster(
        [seen(f"r{i}", "starting", data=DATA, fresh=DATA, rate=9.0) for i in range(3)], quick
    )
    for name, ticks in (("r0", 3), ("r1", 2), ("r2", 40)):
        cluster.set(name, state="serving")
        cluster.tick(ticks)
    assert len(of(Proposal, cluster.log)) == 1


def test_data_that_was_trained_on_starts_no_second_session() -> None:
    cluster = Cluster([seen(f"r{i}", data=DATA, rate=9.0, rate_training=9.0) for i in range(3)])
    assert of(Proposal, cluster.tick(30)) == []


def test_the_adapter_with_most_fresh_data_goes_first_and_a_replica_is_taken_once() -> None:
    data = {"small": 10, "large": 90}
    cluster = Cluster([seen(f"r{i}", "idle", data=data, fresh=data) for i in range(3)])
    proposals = of(Proposal, cluster.tick(1))
    assert [p.adapter for p in proposals] == ["large"]


def test_a_newly_idle_replica_with_data_joins_a_running_session() -> None:
    cluster = Cluster(
        [*(seen(f"r{i}", "combined", data=DATA) for i in range(3)), seen("r3", "idle", data=DATA)]
    )
    cluster.sessions["s0"] = SessionSeen(
        id="s0", adapter="chat", base="m", clients=("r0", "r1", "r2")
    )
    joins = of(Join, cluster.tick(1))
    assert [(j.session, j.replica) for j in joins] == [("s0", "r3")]


def test_a_client_whose_loss_no_longer_falls_leaves() -> None:
    cluster = Cluster([seen(f"r{i}", "combined", data=DATA) for i in range(3)])
    cluster.sessions["s0"] = SessionSeen(
        id="s0",
        adapter="chat",
        base="m",
        clients=("r0", "r1", "r2"),
        losses={"r0": (3.0, 2.0, 1.999, 1.995), "r1": (3.0, 2.0, 1.9, 1.8), "r2": (3.0,)},
    )
    leaves = of(Leave, cluster.tick(1))
    assert [d.replica for d in leaves] == ["r0"]
    assert cluster.state("r0") == "serving"


def test_a_member_that_load_keeps_from_training_goes_back_to_serving() -> None:
    cluster = Cluster([seen(f"r{i}", "combined", data=DATA, suspended=i == 0) for i in range(3)])
    cluster.sessions["s0"] = SessionSeen(
        id="s0", adapter="chat", base="m", clients=("r0", "r1", "r2")
    )
    assert of(Leave, cluster.tick(3)) == []
    assert [d.replica for d in of(Leave, cluster.tick(1))] == ["r0"]


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ((), False),
        ((1.0,), False),
        ((1.0, 1.0), False),
        ((1.0, 1.0, 1.0), True),
        ((1.0, 0.999, 0.998), True),
        ((1.0, 0.99, 1.2), False),
        ((1.0, 1.2, 0.98), False),
        ((1.0, 0.5, 0.9, 0.6), True),
    ],
)
def test_convergence_compares_with_the_best_before(losses: tuple[float, ...], wanted: bool) -> None:
    assert converged(losses, 0.005, 2) is wanted


LOADS = st.builds(Load, utilisation=st.floats(0, 1), queued=st.floats(0, 20), b=st.floats(0, 64))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(LOADS, st.floats(0, 50)), min_size=1, max_size=8),
    st.floats(0, 100),
    st.floats(0, 0.5),
)
def test_the_guard_never_lets_go_what_the_load_needs(
    made: list[tuple[Load, float]], rate: float, headroom: float
) -> None:
    candidates = [Candidate(id=f"r{i}", load=x) for i, (x, _) in enumerate(made)]
    capacities = [Capacity(id=f"r{i}", rate=r) for i, (_, r) in enumerate(made)]
    verdicts = judge(
        candidates,
        capacities,
        floors=Floors(),
        rate=rate,
        headroom=headroom,
        guarded=True,
        completes={},
    )
    gone = {v.id for v in verdicts if v.idle}
    left = [c for c in capacities if c.id not in gone]
    assert left
    if gone:
        assert sum(c.rate for c in left) >= (1 + headroom) * rate - 1e-9
    for verdict in verdicts:
        assert {"U", "U_switch", "needed", "rest_carries"} <= verdict.why.keys()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_on_any_history_the_states_stay_legal_and_decisions_single(
    data: st.DataObject, count: int
) -> None:
    """The cluster asserts each transition; here: one decision a replica and tick at most."""
    cluster = Cluster(
        [
            seen(f"r{i}", data=DATA if i % 2 == 0 else {}, fresh=DATA if i % 2 == 0 else {})
            for i in range(count)
        ],
        Options(t0=3, t_min=2, t_max=6, t_back0=3, max_wait=10.0, min_participants=2),
    )
    for _ in range(25):
        for name in cluster.replicas:
            u = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
            cluster.set(name, load=Load(utilisation=u, queued=3 * u, b=8 * u), rate=5.0)
        before = {name: r.state for name, r in cluster.replicas.items()}
        made = cluster.tick(1, arrivals=data.draw(st.sampled_from([0.0, 1.0, 8.0])))
        movers = [d.replica for d in made if isinstance(d, ToIdle | Back)]
        assert len(movers) == len(set(movers))
        for decision in of(Back, made):
            assert before[decision.replica] == "idle"
        if all(s == "serving" for s in before.values()):
            states = [r.state for r in cluster.replicas.values()]
            assert "serving" in states or "combined" in states
