"""The isolated design: some replicas only train, the others only serve."""

from __future__ import annotations

from services.launcher.gathering import Proposal
from services.launcher.terms import Back, Join, Leave, Options, SessionSeen, ToIdle
from tests.launcher.test_core import Cluster, of, seen

OPTIONS = Options(t0=5, t_min=3, t_max=20, t_back0=4, dedicated=frozenset({"c", "d"}))
DATA = {"data": {"chat": 50}, "fresh": {"chat": 50}}


def test_those_named_are_idle_at_once_whatever_the_load_and_no_other_ever_is() -> None:
    cluster = Cluster([seen(n, u=0.9) for n in "abcd"], OPTIONS)
    first = cluster.tick(1, arrivals=100.0)
    assert [d.replica for d in of(ToIdle, first)] == ["c", "d"]
    for name in "ab":
        cluster.set(name, load=seen(name).load)
    later = cluster.tick(60)
    assert of(ToIdle, later) == of(Back, later) == []
    assert [cluster.state(n) for n in "abcd"] == ["serving", "serving", "idle", "idle"]


def test_an_idle_replica_of_the_serving_part_serves_again() -> None:
    cluster = Cluster([seen("a", "idle"), seen("c", "idle")], OPTIONS)
    assert {d.replica for d in of(Back, cluster.tick(10))} == {"a"}


def test_as_many_clients_as_are_named_make_a_session_and_only_they() -> None:
    """Data on a serving replica waits for nobody."""
    cluster = Cluster([seen(n, **DATA) for n in "abcd"], OPTIONS)
    (proposal,) = of(Proposal, cluster.tick(3))
    assert proposal.clients == ("c", "d")


def test_one_that_has_converged_does_not_come_back_to_the_same_session() -> None:
    cluster = Cluster([seen("a"), seen("c", "combined", **DATA), seen("d", "idle")], OPTIONS)
    flat = {"c": (1.0, 1.0, 1.0, 1.0)}
    running = SessionSeen(id="s", adapter="chat", base="m", clients=("c",), losses=flat)
    cluster.sessions["s"] = running
    assert [d.replica for d in of(Leave, cluster.tick(1))] == ["c"]
    cluster.sessions["s"] = SessionSeen(id="s", adapter="chat", base="m", clients=("e",))
    cluster.set("c", state="serving")
    decisions = cluster.tick(5)
    assert [d.replica for d in of(ToIdle, decisions)] == ["c"]
    assert of(Join, decisions) == []
    del cluster.sessions["s"]
    cluster.tick(1)
    cluster.sessions["t"] = SessionSeen(id="t", adapter="chat", base="m", clients=("e",))
    assert [d.session for d in of(Join, cluster.tick(1))] == ["t"]


def test_load_takes_none_of_them_out_of_a_session() -> None:
    cluster = Cluster([seen("a"), seen("c", "combined", suspended=True, **DATA)], OPTIONS)
    cluster.sessions["s"] = SessionSeen(id="s", adapter="chat", base="m", clients=("c",))
    assert of(Leave, cluster.tick(60)) == []
