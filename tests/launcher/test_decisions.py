"""The launcher's decisions with their numbers: joining, leaving, waiting, rolling back."""

from __future__ import annotations

from typing import Any

import pytest

from services.launcher.books import RATE_FLOOR
from services.launcher.core import Launcher
from services.launcher.gathering import Proposal, Waiting
from services.launcher.idle import Floors
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
from tests.launcher.test_core import OPTIONS, Cluster, of, seen

DATA = {"chat": 100}


def session(*clients: str, **more: Any) -> SessionSeen:
    values: dict[str, Any] = {"id": "s", "adapter": "chat", "base": "m", "clients": clients}
    return SessionSeen(**(values | more))


def tick(
    replicas: list[Seen], sessions: list[SessionSeen] | None = None, ticks: int = 1, **more: Any
) -> list[Decision]:
    """What a fresh launcher decides in the last of so many equal ticks."""
    launcher, found = Launcher(more.pop("options", OPTIONS)), list[Decision]()
    for now in range(ticks):
        found = launcher.tick(replicas, more.get("arrivals", {}), sessions or [], float(now))
    return found


# ------------------------------------------------------------ idle


def test_a_replica_goes_idle_with_its_numbers_and_the_length_of_its_window() -> None:
    replicas = [seen("a", u=0.1, rate=9.0), seen("b", u=0.9, rate=9.0)]
    (decision,) = of(ToIdle, tick(replicas, ticks=OPTIONS.t0))
    assert decision.replica == "a"
    assert decision.why["T"] == 5.0
    assert decision.why["rest_carries"] == 9.0
    assert decision.why["needed"] == pytest.approx(1.2 * RATE_FLOOR, abs=1e-3)


def test_only_serving_replicas_with_a_load_are_candidates() -> None:
    replicas = [
        seen("a", "combined", data=DATA), seen("b", load=None), seen("c", "starting"), seen("d")
    ]  # fmt: skip
    launcher = Launcher(OPTIONS)
    gone = set()
    for now in range(OPTIONS.t0):
        made = launcher.tick(replicas, {}, [session("a")], float(now))
        gone |= {d.replica for d in of(ToIdle, made)}
    assert gone == {"d"}


def test_a_combined_replica_carries_load_and_a_starting_one_does_not() -> None:
    light = seen("a", u=0.1, rate=9.0)
    other = seen("b", "combined", rate=9.0, data=DATA)
    assert of(ToIdle, tick([light, other], [session("b")], OPTIONS.t0))
    other = seen("b", "starting", rate=9.0)
    assert not of(ToIdle, tick([light, other], ticks=OPTIONS.t0))


def test_the_floors_and_the_headroom_are_those_of_the_options() -> None:
    replicas = [seen("a", u=0.4, rate=2.0), seen("b", u=0.9, rate=2.0)]
    high = Options(t0=5, t_min=3, t_max=20, floors=Floors(utilisation=0.5, b=9.0))
    assert of(ToIdle, tick(replicas, ticks=5, options=high, arrivals={"m": 1.5}))
    more = Options(t0=5, t_min=3, t_max=20, headroom=0.5, floors=Floors(utilisation=0.5, b=9.0))
    assert not of(ToIdle, tick(replicas, ticks=5, options=more, arrivals={"m": 1.5}))


def test_going_idle_may_complete_a_session_though_nobody_else_is_left_to_serve() -> None:
    """Two wait Idle; the third carries the load while it trains only if all three do so."""

    def last(training: float) -> list[Decision]:
        more: dict[str, Any] = {"data": DATA, "fresh": DATA, "rate": 5.0}
        replicas = [
            seen(name, state, rate_training=training, **more)
            for name, state in (("a", "idle"), ("b", "idle"), ("c", "serving"))
        ]
        return tick(replicas, ticks=3, options=Options(t0=3, t_min=3), arrivals={"m": 5.0})

    assert of(ToIdle, last(1.9)) == []
    made = last(2.1)
    assert [d.replica for d in of(ToIdle, made)] == ["c"]
    assert [p.clients for p in of(Proposal, made)] == [("a", "b", "c")], "in the same tick"


def test_bases_are_decided_upon_apart() -> None:
    replicas = [seen("a", base="x", rate=9.0), seen("b", base="y", rate=9.0)]
    assert tick(replicas, ticks=9) == [], "each is the last of its base"
    both = [*replicas, seen("c", base="x", rate=9.0), seen("d", base="y", rate=9.0)]
    gone = {d.replica for d in of(ToIdle, tick(both, ticks=OPTIONS.t0))}
    assert gone == {"a", "b"}


def test_the_rate_is_that_of_the_base() -> None:
    launcher = Launcher(OPTIONS)
    assert launcher.rate("m") == RATE_FLOOR
    launcher.tick([], {"m": 4.0}, [], 0.0)
    assert launcher.rate("m") == 4.0


# ------------------------------------------------------------ joining


def test_who_joins_brings_data_for_the_sessions_adapter() -> None:
    replicas = [
        seen("a", "combined", data=DATA),
        seen("none", "idle"),
        seen("empty", "idle", data={"chat": 0}),
        seen("other", "idle", data={"code": 5}),
        seen("elsewhere", "idle", base="y", data=DATA),
        seen("busy", data=DATA, u=0.9),
        seen("has", "idle", data={"chat": 7}),
    ]
    joins = of(Join, tick(replicas, [session("a")]))
    assert joins == [Join(session="s", replica="has", why={"samples": 7.0, "adapter": "chat"})]
    assert of(Join, tick(replicas, [session("a", open=False)])) == []


def test_a_member_does_not_join_again_and_one_joins_one_session_only() -> None:
    replicas = [seen("a", "idle", data={"chat": 1, "code": 1})]
    assert of(Join, tick(replicas, [session("a")])) == []
    both = [session(id="t", adapter="code"), session(id="s")]
    assert [j.session for j in of(Join, tick(replicas, both))] == ["s"], "by name"


def test_one_that_joins_is_not_rolled_back_nor_taken_for_another_session() -> None:
    options = Options(t0=5, t_min=3, t_back0=1, min_participants=1)
    replicas = [seen("a", "idle", data={"chat": 1, "code": 1}, fresh={"code": 1})]
    found = tick(replicas, [session()], ticks=5, options=options)
    assert [type(d) for d in found] == [Join], "and what the other one waits for is told already"


# ------------------------------------------------------------ leaving


def test_one_that_converged_leaves_with_its_losses() -> None:
    losses = {"a": (3.0, 2.00004, 1.999, 1.995)}
    (leave,) = tick([seen("a", "combined", data=DATA)], [session("a", losses=losses)])
    assert leave == Leave(
        session="s",
        replica="a",
        why={
            "converged": "loss fell less than 0.005 for 2 rounds",
            "loss": 1.995,
            "best_before": 2.0,
        },
    )


def test_one_that_is_not_seen_leaves_only_when_it_has_converged() -> None:
    assert tick([], [session("lost")]) == []
    found = tick([], [session("lost", losses={"lost": (1.0, 1.0, 1.0)})])
    assert [d.replica for d in of(Leave, found)] == ["lost"]


def test_one_that_load_keeps_from_training_leaves_after_t_back_ticks() -> None:
    replicas = [
        seen("a", "combined", data=DATA, suspended=True),
        seen("b", "combined", data=DATA, suspended=True, base="m"),
    ]
    assert of(Leave, tick(replicas, [session("a")], ticks=3)) == []
    found = of(Leave, tick(replicas, [session("a")], ticks=4))
    assert found == [Leave(session="s", replica="a", why={"suspended_ticks": 4.0})]


# ------------------------------------------------------------ waiting and gathering


def test_waiting_is_told_once_until_what_is_missing_changes() -> None:
    cluster = Cluster(
        [seen("a", "idle", data=DATA, fresh=DATA), seen("b", u=0.9), seen("c", u=0.9)],
        Options(t0=50, t_min=50, t_back0=50),
    )
    assert len(of(Waiting, cluster.tick(1))) == 1
    assert of(Waiting, cluster.tick(3)) == []
    cluster.set("b", data=DATA)
    (told,) = of(Waiting, cluster.tick(1))
    assert "only 2 of the live replicas hold any (a, b)" in told.why
    assert told.since == 1.0, "it waits since the first tick"
    cluster.set("a", fresh={})
    assert of(Waiting, cluster.tick(1)) == []
    cluster.set("a", fresh=DATA)
    (told,) = of(Waiting, cluster.tick(1))
    assert told.since == 7.0, "its wait began anew"


def test_data_that_went_with_its_replica_goes_on_waiting() -> None:
    """Nobody seen holds any: the wait is kept for when the replica is back."""
    cluster = Cluster([seen("a", "idle", data=DATA, fresh=DATA), seen("b", u=0.9)])
    cluster.tick(1)
    gone = cluster.replicas.pop("a")
    cluster.tick(3)
    cluster.replicas["a"] = gone
    cluster.tick(1)
    assert cluster.launcher._waiting == {"chat": 1.0}


def test_an_adapter_in_a_session_does_not_wait() -> None:
    cluster = Cluster([seen("a", "combined", data=DATA, fresh=DATA)])
    cluster.sessions["s"] = session("a")
    cluster.tick(1)
    assert cluster.launcher._waiting == {}


def test_after_its_session_began_an_adapter_waits_anew() -> None:
    options = Options(t0=50, t_min=50, t_back0=50, min_participants=2, max_wait=5.0)
    replicas = [seen("a", "idle", data=DATA, fresh=DATA), seen("b", u=0.9)]
    launcher = Launcher(options)
    kinds = []
    for now in range(12):
        kinds += [(now, type(d)) for d in launcher.tick(replicas, {}, [], float(now))]
    # nobody carries the proposals out here: the same is found again after another five seconds
    assert kinds == [(0, Waiting), (5, Proposal), (6, Waiting), (11, Proposal)]


def test_a_group_that_grows_starts_its_patience_anew_and_one_that_shrinks_does_not() -> None:
    options = Options(t0=50, t_min=3, t_max=60, t_back0=4)
    cluster = Cluster(
        [*(seen(name, "serving", u=0.9, data=DATA, fresh=DATA) for name in "abcd")], options
    )
    cluster.set("a", state="idle")
    cluster.tick(3)
    cluster.set("b", state="idle")
    assert of(Back, cluster.tick(3)) == []
    backs = of(Back, cluster.tick(2))
    assert sorted(d.replica for d in backs) == ["a", "b"], "together"


def test_those_that_are_taken_for_a_session_are_not_rolled_back() -> None:
    options = Options(t0=3, t_min=3, t_back0=1, min_participants=1, max_wait=50.0)
    replicas = [seen("a", "idle", data=DATA, fresh=DATA), seen("b", "idle")]
    found = tick(replicas, ticks=3, options=options)
    assert [d.clients for d in of(Proposal, found)] == [("a",)]
    assert of(Back, found) == [Back(replica="b", why={"idle_ticks": 3.0, "T_back": 3.0})]


def test_a_member_of_a_session_is_not_rolled_back() -> None:
    options = Options(t0=3, t_min=1, t_back0=1)
    assert tick([seen("a", "idle")], [session("a")], ticks=5, options=options) == []
    assert len(of(Back, tick([seen("a", "idle")], ticks=5, options=options))) == 1


def test_a_holder_is_what_was_seen() -> None:
    """The best of the three is the server, wherever it stands."""
    replicas = [
        seen(name, "idle", data=DATA, fresh=DATA, quality=quality)
        for name, quality in (("a", 1.0), ("b", 3.0), ("c", 2.0))
    ]
    (proposal,) = tick(replicas)
    assert proposal == Proposal(
        adapter="chat",
        base="m",
        clients=("a", "b", "c"),
        server="b",
        why="3 Idle replicas hold data for it",
    )


def test_a_load_of_its_own_is_not_needed_to_train() -> None:
    replicas = [seen(n, "idle", load=None, data=DATA, fresh=DATA) for n in "abc"]
    assert len(of(Proposal, tick(replicas))) == 1


def test_what_replicas_did_stands_in_for_a_latency_model() -> None:
    """At half its capacity it finished two requests a tick, at nine tenths 3.6."""
    options = Options(t0=5, t_min=3, t_max=20, floors=Floors(utilisation=0.5, b=9.0, share=0.5))
    replicas = [
        seen(n, load=Load(utilisation=u, queued=0.0, b=0.1), finished=4 * u)
        for n, u in (("a", 0.5), ("b", 0.9), ("c", 0.9))
    ]
    (found,) = of(ToIdle, tick(replicas, ticks=5, options=options, arrivals={"m": 6.0}))
    assert (found.replica, found.why["rest_carries"]) == ("a", pytest.approx(8.0))
