"""The books of one model: what comes twice, too late, too early, or to nobody."""

from __future__ import annotations

import msgspec
import pytest

from services.dispatcher.desk import CANCELS_MAX, FLUSH_SECONDS, Desk
from services.dispatcher.entries import Entry
from services.dispatcher.policies.base import Completion, Request
from services.dispatcher.policies.least_loaded import LeastLoaded
from services.dispatcher.remembered import Remembered
from shared.demand import RETRY_MAX
from shared.messages import Failed, Lost
from tests.dispatcher.made import request as made
from tests.dispatcher.made import view


def entry(key: str = "q", attempt: int = 1, stream_id: bytes = b"1-0", **more: object) -> Entry:
    request = Request(id=f"{key}/{attempt}", arrival=0.0, prompt_tokens=5, max_tokens=5)
    fields: dict[str, object] = {"gateway": "g", "queued": 0.0, "request": request, **more}
    return Entry(id=key, attempt=attempt, stream_id=stream_id, body=b"", **fields)  # type: ignore[arg-type]


def desk(queue_max: int = 10) -> Desk:
    return Desk("m", LeastLoaded(), queue_max)


def told(desk: Desk) -> list[tuple[str, int | None]]:
    """Request and status of each refusal; None: nobody is told."""
    return [(r.entry.key, getattr(r.reply, "status", None)) for r in desk.refusals]


# ------------------------------------------------------------ cancels


def test_a_request_whose_cancel_was_read_first_is_dropped_when_it_comes() -> None:
    books = desk()
    books.cancel("q", 0.0)
    books.arrive(entry("q"), 1.0)
    books.arrive(entry("other", stream_id=b"2-0"), 1.0)
    assert told(books) == [("q/1", None)]
    assert list(books.waiting) == ["other/1"]
    assert books.policy.queued() == 1


def test_a_cancel_holds_for_an_attempt_that_is_still_unread_too() -> None:
    books = desk()
    books.arrive(entry("q"), 0.0)
    books.take(["q/1"], "r", 0.0)
    books.cancel("q", 1.0)
    assert books.cancels == [("r", "q")]
    books.gone("r", 2.0)
    books.arrive(entry("q", attempt=2, stream_id=b"2-0"), 3.0)
    assert told(books) == [("q/2", None)]


def test_so_many_cancelled_ids_are_kept() -> None:
    kept = Remembered(2)
    for one in ("a", "b", "a", "c"):
        kept.add(one)
    assert [one in kept for one in "abc"] == [True, False, True]
    books = desk()
    for n in range(CANCELS_MAX + 1):
        books.cancel(f"q{n}", 0.0)
    books.arrive(entry("q0"), 1.0)
    books.arrive(entry("q1", stream_id=b"2-0"), 1.0)
    assert list(books.waiting) == ["q0/1"], "the oldest of them is forgotten"


# ------------------------------------------------------------ read again


@pytest.mark.parametrize("released", [False, True])
def test_an_entry_that_a_claim_reads_again_is_no_second_copy(released: bool) -> None:
    books = desk()
    books.arrive(entry("q"), 0.0)
    if released:
        books.take(["q/1"], "r", 0.5)
    books.arrive(entry("q"), 1.0)
    assert told(books) == []
    assert (list(books.waiting), list(books.flying)) == (
        ([], ["q/1"]) if released else (["q/1"], [])
    )
    books.arrive(entry("q", stream_id=b"2-0"), 2.0)
    assert told(books) == [("q/1", None)], "this one is"


def test_a_queued_copy_of_a_preempted_request_may_be_read_again_too() -> None:
    books = desk()
    books.arrive(entry("q"), 0.0)
    books.take(["q/1"], "r", 0.0)
    books.recall(["q/1"], "r")
    copy = entry("q", stream_id=b"2-0", taken_from="r")
    books.arrive(copy, 0.1)
    books.finish(Completion(id="q/1", replica="r", output_tokens=0, reason="cancelled"), 0.2)
    assert list(books.waiting) == ["q/1"]
    books.arrive(copy, 0.3)
    assert told(books) == []


# ------------------------------------------------------------ preemption


def recalled() -> Desk:
    books = desk()
    books.arrive(entry("q"), 0.0)
    books.take(["q/1"], "r", 0.0)
    books.recall(["q/1"], "r")
    return books


@pytest.mark.parametrize("how", ["cancel", "gateway"])
@pytest.mark.parametrize("copy_first", [True, False])
def test_a_client_that_leaves_while_its_request_is_taken_back_is_not_served(
    how: str, copy_first: bool
) -> None:
    books, copy = recalled(), entry("q", stream_id=b"2-0", taken_from="r")
    if copy_first:
        books.arrive(copy, 0.1)
    if how == "cancel":
        books.cancel("q", 0.2)
    else:
        books.drop_gateway("g", 0.2)
    books.finish(Completion(id="q/1", replica="r", output_tokens=0, reason="cancelled"), 0.3)
    if not copy_first:
        books.arrive(copy, 0.4)
    assert not books.waiting
    assert told(books) == [("q/1", None)]
    assert books.cancels == [("r", "q")]


def test_a_gateway_is_told_that_its_request_was_taken_back_not_that_a_replica_died() -> None:
    books = recalled()
    books.finish(Completion(id="q/1", replica="r", output_tokens=3, reason="cancelled"), 0.1)
    books.arrive(entry("q", stream_id=b"2-0", taken_from="r"), 0.2)
    (refusal,) = books.refusals
    assert refusal.reply == Lost(id="q", attempt=1, replica="r", preempted=True)


# ------------------------------------------------------------ the way in


def test_what_is_queued_again_is_not_fresh() -> None:
    books = desk()
    books.arrive(entry("q"), 0.0)
    assert books.waiting["q/1"].request.fresh
    books.put_back(books.take(["q/1"], "r", 1.0), "r", 1.1)
    assert not books.waiting["q/1"].request.fresh
    books = recalled()
    books.arrive(entry("q", stream_id=b"2-0", taken_from="r"), 0.1)
    books.finish(Completion(id="q/1", replica="r", output_tokens=0, reason="cancelled"), 0.2)
    assert not books.waiting["q/1"].request.fresh


# ------------------------------------------------------------ a full queue


def _retry_after(books: Desk) -> float | None:
    (refusal,) = books.refusals
    assert isinstance(refusal.reply, Failed)
    assert (refusal.reply.status, refusal.reply.code) == (503, "server_is_overloaded")
    return refusal.reply.retry_after


def test_a_full_queue_lets_continuations_in() -> None:
    books = desk(queue_max=1)
    books.arrive(entry("a"), 0.0)
    books.arrive(entry("b", attempt=2, stream_id=b"2-0"), 0.0)
    assert list(books.waiting) == ["a/1", "b/2"]
    books.arrive(entry("c", stream_id=b"3-0"), 0.0)
    assert _retry_after(books) == 1.0, "nothing has left the queue yet"


@pytest.mark.parametrize(
    ("left", "seconds"), [(20, 2.0), (5, 6.0), (1, 30.0)], ids=["quick", "slow", "slower"]
)
def test_a_full_queue_names_the_time_in_which_it_empties(left: int, seconds: float) -> None:
    """Three wait; so many left in the last ten seconds."""
    books = desk(queue_max=3)
    books.demand.outflow.left(left, 90.0)
    for n in range(4):
        books.arrive(entry(f"q{n}", stream_id=b"%d-0" % n), 100.0)
    assert _retry_after(books) == seconds


def test_what_left_the_queue_long_ago_says_nothing_and_no_time_is_without_end() -> None:
    books = desk(queue_max=1)
    books.demand.outflow.left(1000, 10.0)
    assert books.demand.summary(11.0).released == pytest.approx(1000.0)
    assert books.demand.summary(100.0).released == 0.0
    books = desk(queue_max=1000)
    books.demand.outflow.left(1, 75.0)
    for n in range(1001):
        books.arrive(entry(f"q{n}", stream_id=b"%d-0" % n), 100.0)
    assert _retry_after(books) == RETRY_MAX


# ------------------------------------------------------------ corrections


def test_a_release_that_was_on_its_way_when_the_stream_was_read_is_not_taken_for_lost() -> None:
    books = desk()
    books.arrive(entry("q"), 0.0)
    books.take(["q/1"], "r", 10.0)
    just_after, later = 10.0 + FLUSH_SECONDS / 2, 10.0 + 2 * FLUSH_SECONDS
    assert not books.comparable("r", just_after)
    assert books.reconcile("r", set(), just_after, 11.0) == 0
    assert list(books.flying) == ["q/1"]
    assert books.comparable("r", later)
    assert books.reconcile("r", {"q/1"}, later, 13.0) == 0
    assert books.reconcile("r", set(), later, 13.0) == 1
    assert books.comparable("r", 0.0), "nothing is in flight"


# ------------------------------------------------------------ room


def large(key: str, stream_id: bytes) -> Entry:
    return entry(key, stream_id=stream_id, request=made(f"{key}/1", prompt_tokens=900))


def test_what_only_a_replica_that_is_gone_could_carry_is_refused() -> None:
    books = desk()
    books.see(view("small", context=100), 0.0)
    books.see(view("big", context=1000), 0.0)
    books.arrive(large("q", b"1-0"), 0.0)
    books.arrive(entry("fits", stream_id=b"2-0"), 0.0)
    books.refuse_misfits(0.0)
    assert told(books) == []
    books.gone("big", 1.0)
    books.refuse_misfits(1.0)
    assert told(books) == [("q/1", 400)]
    assert list(books.waiting) == ["fits/1"]
    assert books.policy.queued() == 1
    books.arrive(large("new", b"3-0"), 2.0)
    assert told(books)[1:] == [("new/1", 400)]


def test_a_replica_that_is_back_in_the_same_turn_is_not_missed() -> None:
    books = desk()
    books.see(view("small", context=100), 0.0)
    books.see(view("big", context=1000), 0.0)
    books.arrive(large("q", b"1-0"), 0.0)
    books.gone("big", 1.0)
    books.see(view("big", context=0, kv_total=0), 1.0)  # it has not said yet what it carries
    books.refuse_misfits(1.0)
    assert told(books) == []
    books.see(view("big", context=200), 2.0)
    books.refuse_misfits(2.0)
    assert told(books) == [("q/1", 400)]


def test_an_entry_keeps_all_but_its_freshness_when_it_is_queued_again() -> None:
    one = entry("q")
    again = msgspec.structs.replace(one.again(), request=one.request)
    assert again == one
