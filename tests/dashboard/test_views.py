"""What the page shows, from plain data: buckets, states over time, goodput, sessions, events."""

from __future__ import annotations

import pytest

from collm.dashboard import charts, markup, views
from collm.dashboard.buckets import Buckets
from collm.dashboard.history import EVENTS, KEYS, History, Move, Snapshot
from shared.adapters import Adapter, AdapterVersion
from shared.demand import ModelDemand
from shared.messages import StepSample, TrainSample
from shared.records import ModelCard, ReplicaRecord
from shared.sessions import Phase, Session

T0 = 1_000_000.0


def step(time: float, *, replica: str = "replica-0", b: int = 4, tokens: int = 20) -> StepSample:
    return StepSample(
        replica=replica, model="m", incarnation="1", seq=1, time=time, seconds=0.5, b=b,
        decode_tokens=tokens,
    )  # fmt: skip


def entry(time: float, number: int = 0) -> str:
    return f"{int(time * 1000)}-{number}"


def connected() -> History:
    history = History(600)
    history.take_absence(None)
    return history


def test_buckets_keep_no_more_than_they_are_told() -> None:
    buckets = Buckets(2.0, keep=10)
    for second in range(1000):
        buckets.add(float(second), n=1)
    assert len(buckets) == 10
    assert sum(g[2]["n"] for g in buckets.grouped(0, 1000, 1000)) == 20


def test_buckets_leave_out_the_slice_that_is_not_over() -> None:
    buckets = Buckets(2.0, keep=10)
    buckets.add(0.5, n=1)
    buckets.add(2.5, n=5)
    assert [(t, s["n"]) for t, _, s in buckets.grouped(0, 3.0, 10)] == [(0.0, 1)]


def test_an_old_sample_after_a_newer_one_does_not_come_back() -> None:
    buckets = Buckets(2.0, keep=5)
    buckets.add(100.0, n=1)
    buckets.add(3.0, n=1)
    assert len(buckets) == 1


def test_a_replica_was_in_the_state_that_its_first_known_change_left() -> None:
    moves = [
        Move(50.0, "serving", "idle", "launcher", "quiet"),
        Move(80.0, "idle", "combined", "", ""),
    ]
    found = views.segments(moves, ReplicaRecord(id="r"), 0.0, 100.0)
    assert [(s.state, s.left, round(s.width, 6)) for s in found] == [
        ("serving", 0.0, 0.5),
        ("idle", 0.5, 0.3),
        ("combined", 0.8, 0.2),
    ]


def test_states_outside_the_window_are_cut() -> None:
    moves = [Move(10.0, "", "starting", "", ""), Move(20.0, "starting", "serving", "", "")]
    found = views.segments(moves, ReplicaRecord(id="r"), 100.0, 200.0)
    assert [(s.state, s.start, s.end) for s in found] == [("serving", 100.0, 200.0)]


def test_without_a_known_change_the_record_tells_the_state() -> None:
    record = ReplicaRecord(id="r", state="serving", since=150.0)
    found = views.segments([], record, 100.0, 200.0)
    assert [(s.state, s.left) for s in found] == [("serving", 0.5)]


def test_goodput_is_what_the_gateway_counted_since_its_first_reading() -> None:
    history = connected()
    history.take_gateway("g", T0, 100, 50)  # before the dashboard looked: no part of the curve
    history.take_gateway("g", T0 + 2, 106, 52)
    found = views.rates(history, T0 + 4, 300)
    assert sum(v or 0 for _, v in found.goodput) == pytest.approx(3.0)  # 6 in 2 s
    assert [v for _, v in found.attainment if v is not None] == [pytest.approx(0.75)]


def test_a_restarted_gateway_begins_at_nought() -> None:
    history = connected()
    history.take_gateway("g", T0, 100, 0)
    history.take_gateway("g", T0 + 2, 4, 0)
    assert sum(v or 0 for _, v in views.rates(history, T0 + 4, 300).goodput) == pytest.approx(2.0)


def test_goodput_is_unknown_rather_than_nought_without_a_reading() -> None:
    history = connected()
    history.take_step(entry(T0), step(T0))
    found = views.rates(history, T0 + 10, 300)
    assert {v for _, v in found.goodput} == {None}
    assert [t.label for t in views.tiles(history, T0 + 10)][-1] == "answers / s"


def test_arrivals_are_the_sum_over_models_and_absent_when_no_dispatcher_speaks() -> None:
    history = connected()
    said = {"m": ModelDemand(rate=3.0, wait_p95=0.2), "n": ModelDemand(rate=1.5, wait_p95=0.05)}
    history.take_snapshot(Snapshot(time=T0, demand=said))
    found = {t.label: t for t in views.tiles(history, T0)}
    assert (found["requests / s"].value, found["requests / s"].hint) == ("4.5", "p95 wait 200 ms")
    history.take_snapshot(Snapshot(time=T0 + 1))
    assert "requests / s" not in {t.label for t in views.tiles(history, T0 + 1)}


def test_throughput_is_unknown_before_the_first_sample_and_nought_after_it() -> None:
    history = connected()
    history.take_step(entry(T0), step(T0, tokens=40))
    curve = views.rates(history, T0 + 8, 300).tokens
    assert curve[0][1] is None
    assert next(v for _, v in curve if v is not None) == pytest.approx(20.0)
    assert curve[-1][1] == 0.0


def test_a_batch_is_weighted_by_the_time_it_computed() -> None:
    history = connected()
    long = StepSample(
        replica="replica-0", model="m", incarnation="1", seq=1, time=T0, seconds=3.0, b=8
    )
    history.take_step(entry(T0), step(T0, b=2))
    history.take_step(entry(T0 + 1), long)
    assert views.batch_of(history, "replica-0", T0 + 2) == pytest.approx((0.5 * 2 + 3 * 8) / 3.5)
    assert views.batch_of(history, "replica-0", T0 + 60) == 0.0


def test_the_ideal_is_the_mean_over_ready_replicas_that_have_one() -> None:
    history = connected()
    records = (
        ReplicaRecord(id="a", state="serving", b_star=10),
        ReplicaRecord(id="b", state="combined", b_star=20),
        ReplicaRecord(id="c", state="serving", b_star=0),
        ReplicaRecord(id="d", state="dead", b_star=90),
    )
    history.take_snapshot(Snapshot(time=T0, replicas=records, queued={"m": 7}))
    found = views.levels(history, T0 + 4, 300)
    assert [v for _, v in found.ideal if v is not None] == [15.0]
    assert [v for _, v in found.queued if v is not None] == [7.0]


def test_a_replica_without_heartbeat_is_said_to_be_silent_unless_it_is_dead() -> None:
    history = connected()
    records = tuple(ReplicaRecord(id=s, state=s) for s in ("serving", "dead", "stopped", "idle"))
    history.take_snapshot(Snapshot(time=T0, replicas=records, alive=frozenset({"idle"})))
    assert [ln.silent for ln in views.lanes(history, T0, 300)] == [True, False, False, False]


@pytest.mark.parametrize("engine", ["emulated", "torch"])
def test_emulated_data_is_known_as_such(engine: str) -> None:
    history = connected()
    card = ModelCard(name="m", path="", context=1, vocabulary=1, engine=engine)
    history.take_snapshot(Snapshot(time=T0, models=(card,)))
    assert history.any_emulated is (engine == "emulated")


def test_versions_that_were_not_promoted_are_marked_in_the_quality_curve() -> None:
    history = connected()
    versions = (
        AdapterVersion(version="r1", path="", round=1, created=1.0),
        AdapterVersion(version="r2", path="", round=2, quality=1.1, promoted=False, created=3.0),
    )
    adapter = Adapter(name="a", base="m", rank=8, current="r1")
    history.take_snapshot(Snapshot(time=T0, adapters=(adapter,), versions={"a": versions}))
    (row,) = views.adapters(history)
    assert row.versions == ((1, 1.0, True, "r1"), (2, 1.1, False, "r2"))
    series = charts.quality([row])["series"][0]["data"]
    assert "borderColor" in series[1]["itemStyle"]
    assert "borderColor" not in series[0]["itemStyle"]


def session(**changes: object) -> Session:
    plain = dict(id="s1", adapter="a", base="m", clients=("r0", "r1"), server="r0", created=T0)
    return Session(**{**plain, **changes})  # type: ignore[arg-type]


def test_a_session_has_the_losses_of_its_own_time_and_rounds() -> None:
    history = connected()
    running = session(phase=Phase.TRAIN, deadline=T0 + 50)
    history.take_snapshot(Snapshot(time=T0, sessions=(running,)))
    for time in (T0 - 5, T0 + 5):  # the first is of an earlier session
        history.take_training(
            TrainSample(
                replica="r0", adapter="a", time=time, round=1, step=1, B=4, b=0,
                micro_seconds=0.1, loss=2.0,
            )
        )  # fmt: skip
    fields = {"kind": "round_done", "session": "s1", "round": "1", "loss": "1.9", "heldout": "2.1"}
    history.take_event(entry(T0 + 9), fields)
    history.take_event(entry(T0 + 9, 1), {**fields, "session": "another"})
    (view,) = views.session_views(history, T0 + 10)
    assert view.steps == {"r0": [(T0 + 5, 2.0)]}
    assert view.loss == [(T0 + 9, 1.9)]
    assert view.heldout == [(T0 + 9, 2.1)]
    assert view.remaining == 40.0


def test_an_ended_session_says_why() -> None:
    history = connected()
    history.take_snapshot(Snapshot(time=T0, sessions=(session(),)))
    history.take_snapshot(Snapshot(time=T0 + 1))
    why = {"kind": "session_ended", "session": "s1", "why": "loss falls no more"}
    history.take_event(entry(T0 + 1), why)
    (view,) = views.session_views(history, T0 + 2)
    assert (view.phase, view.ended) == ("ended", "loss falls no more")


def test_events_are_filtered_by_kind_and_by_every_word() -> None:
    history = connected()
    for number, (kind, replica) in enumerate((("state", "r-1"), ("lost", "r-1"), ("state", "r-2"))):
        fields = {"kind": kind, "replica": replica, "why": "Heartbeat expired"}
        history.take_event(entry(T0, number), fields)
    assert [e.id for e in views.events(history)] == [entry(T0, n) for n in (2, 1, 0)]
    assert [e.id for e in views.events(history, ["state"], "r-1 HEARTBEAT")] == [entry(T0, 0)]
    assert views.events(history, (), "nowhere") == []


def test_memory_is_bounded_whatever_comes() -> None:
    history = connected()
    for number in range(3000):
        history.take_event(entry(T0, number), {"kind": "state", "replica": f"r{number}", "to": "x"})
        history.take_step(entry(T0 + number), step(T0, replica=f"r{number}"))
    assert len(history.events) == EVENTS
    assert len(history.moves) == KEYS
    assert len(history.batches) == KEYS
    assert len(history.rates) <= 300


def test_what_others_wrote_cannot_become_markup() -> None:
    history = connected()
    bad = "<img src=x onerror=alert(1)>\"'"
    history.take_event(entry(T0), {"kind": bad, bad: bad, "replica": bad})
    history.take_event(entry(T0, 1), {"kind": "state", "replica": bad, "to": bad, "why": bad})
    record = ReplicaRecord(id=bad, state=bad, adapters={bad: bad})
    adapter = Adapter(name=bad, base=bad, rank=1, tenant=bad, current=bad)
    versions = {bad: (AdapterVersion(version=bad, path=bad),)}
    running = session(adapter=bad, why=bad, clients=(bad,))
    history.take_snapshot(
        Snapshot(
            time=T0, replicas=(record,), adapters=(adapter,), versions=versions, sessions=(running,)
        )
    )
    shown = [
        markup.events(views.events(history)),
        markup.timeline(views.lanes(history, T0 + 5, 300), 300),
        markup.adapters(views.adapters(history)),
        *(markup.session(v) for v in views.session_views(history, T0)),
    ]
    assert len(shown) == 4
    for part in shown:
        assert "<img" not in part
        assert 'onerror=alert(1)>"' not in part


def test_an_empty_cluster_has_views_too() -> None:
    history = connected()
    assert views.lanes(history, T0, 300) == []
    assert views.adapters(history) == []
    assert views.session_views(history, T0) == []
    assert charts.batches([])["series"][0]["data"] == []
    assert "0 / 0" in markup.tiles(views.tiles(history, T0))
