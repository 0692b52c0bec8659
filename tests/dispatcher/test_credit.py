"""What counts as held back on purpose, and what as queueing."""

from __future__ import annotations

from services.dispatcher.credit import CreditClock
from services.dispatcher.desk import Desk
from services.dispatcher.entries import Entry
from services.dispatcher.policies.base import Completion, ReplicaView, Request
from services.dispatcher.policies.round_robin import RoundRobin


def _view(name: str = "r", *, limit: int = 2, dispatchable: bool = True) -> ReplicaView:
    return ReplicaView(id=name, dispatchable=dispatchable, b_limit=limit)


def _entry(key: str, now: float) -> Entry:
    request = Request(id=f"{key}/1", arrival=now, prompt_tokens=5, max_tokens=5)
    return Entry(
        id=key, attempt=1, gateway="g", stream_id=b"1-0", body=b"", queued=now, request=request
    )


def test_the_clock_runs_while_a_dispatchable_replica_has_a_free_place() -> None:
    clock = CreditClock()
    assert clock.seconds(5.0) == 0.0, "no replica, no credit"
    clock.see(_view(), 10.0)
    clock.loaded("r", 1, 11.0)
    clock.loaded("r", 1, 12.0)  # full
    assert clock.seconds(20.0) == 2.0
    clock.see(_view("idle", dispatchable=False), 21.0)
    assert clock.seconds(22.0) == 2.0, "an Idle replica takes nothing"
    clock.see(_view(limit=3), 23.0)
    clock.gone("r", 24.0)
    assert clock.seconds(30.0) == 3.0
    clock.see(_view(), 40.0)
    assert clock.seconds(41.0) == 4.0, "what the lost replica had is not in flight any more"


def test_a_request_knows_how_much_of_its_wait_was_on_purpose() -> None:
    desk = Desk("m", RoundRobin(), queue_max=10)
    desk.see(_view(limit=1), 0.0)
    desk.arrive(_entry("a", 1.0), 1.0)
    assert desk.waits("a/1", 3.0) == (2.0, 2.0), "a place was free all the time"
    desk.take(["a/1"], "r", 3.0)
    desk.arrive(_entry("b", 4.0), 4.0)
    assert desk.waits("b/1", 6.0) == (2.0, 0.0), "no place was free"
    desk.finish(Completion(id="a/1", replica="r", output_tokens=5, reason="length"), 6.0)
    assert desk.waits("b/1", 7.0) == (3.0, 1.0)
    (entry,) = desk.take(["b/1"], "r", 7.0)
    desk.put_back([entry], "r", 8.0)
    assert desk.waits("b/1", 9.0) == (1.0, 1.0), "the release was refused: its wait begins anew"
