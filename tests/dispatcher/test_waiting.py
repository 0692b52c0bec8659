"""What is worked out about a waiting request once, and the queues and shares it waits in."""

from __future__ import annotations

import math

import pytest

from services.dispatcher.policies.parts.queues import STALE_MAX, Queues
from services.dispatcher.policies.parts.share import TokenShares
from services.dispatcher.policies.parts.waiting import CHUNK, DEFERRED, GONE, LATE, MAIN, Waiting
from tests.dispatcher.made import request


def waiting(
    key: str = "q", output: float = 10.0, cost: float = 2.0, latest: float = 5.0, **more: object
) -> Waiting:
    return Waiting(request(key, **more), output, cost, latest, 1.0)


# ------------------------------------------------------------ one request


def test_a_request_is_worth_its_tokens_per_replica_second() -> None:
    w = waiting()
    assert (w.output, w.cost, w.latest, w.arrived) == (10.0, 2.0, 5.0, 1.0)
    assert w.density == 5.0
    assert waiting(cost=1.0).density == 10.0
    assert waiting(cost=0.0).density == math.inf
    assert (w.kv, w.prompt, w.place, w.late) == (110, 100, GONE, False)


@pytest.mark.parametrize(("prompt", "chunks"), [(1, 1), (CHUNK, 1), (CHUNK + 1, 2), (1100, 3)])
def test_a_prompt_takes_a_step_for_each_chunk_begun(prompt: int, chunks: int) -> None:
    assert waiting(prompt_tokens=prompt).chunks == chunks


@pytest.mark.parametrize(
    ("limits", "bound", "plain", "due"),
    [
        ({}, False, True, math.inf),
        ({"deadline": 7.0}, True, True, 7.0),
        ({"ttft_deadline": 7.0}, True, False, math.inf),
        ({"tpot": 0.5}, True, False, math.inf),
        ({"deadline": 7.0, "tpot": 0.5}, True, False, 7.0),
        ({"deadline": 7.0, "ttft_deadline": 3.0}, True, False, 7.0),
    ],
)
def test_which_limits_it_has(
    limits: dict[str, float], bound: bool, plain: bool, due: float
) -> None:
    w = waiting(**limits)
    assert (w.bound, w.plain, w.due) == (bound, plain, due)


def test_the_last_token_is_due_at_its_pace_or_its_deadline() -> None:
    assert waiting().due_after(2.0, 6.0) == math.inf
    # Ten tokens of 0.4 s each are predicted; between the first and the last there are nine.
    assert waiting(tpot=0.5).due_after(2.0, 6.0) == pytest.approx(2.0 + 0.5 * 9 + 0.4)
    assert waiting(tpot=0.5, deadline=3.0).due_after(2.0, 6.0) == 3.0
    assert waiting(tpot=0.5, output=1.0).due_after(2.0, 6.0) == math.inf, "one token has no pace"
    assert waiting(tpot=0.5, output=2.0).due_after(2.0, 3.0) == 3.0


@pytest.mark.parametrize("output", [2.0, 3.0, 100.0])
def test_a_limit_on_the_pace_is_kept_by_steps_that_are_no_longer(output: float) -> None:
    for step, kept in ((0.49, True), (0.51, False)):
        assert waiting(tpot=0.5, output=output).met(1.0, 1.0 + output * step, 0.0) is kept


def test_limits_are_met_with_the_margin_and_not_a_moment_later() -> None:
    w = waiting(ttft_deadline=2.0, deadline=4.0)
    assert w.met(1.5, 3.5, 0.5)
    assert not w.met(1.75, 3.5, 0.5), "the first token"
    assert not w.met(1.5, 3.75, 0.5), "the last token"
    assert waiting(deadline=4.0).met(3.9, 3.5, 0.5), "no limit for the first token"
    # 9 steps of 0.4 s or 0.45 s take 0.9 s or 0.45 s less than they may
    assert waiting(tpot=0.5).met(1.0, 5.0, 0.89)
    assert not waiting(tpot=0.5).met(1.0, 5.0, 0.91)
    assert not waiting(tpot=0.5).met(1.0, 5.5, 0.46)


# ------------------------------------------------------------ queues


def entered(place: int, *keys: str, **more: object) -> tuple[Queues, list[Waiting]]:
    queues, made = Queues(), []
    for key in keys:
        w = waiting(key, **more)  # type: ignore[arg-type]
        queues.enter(w, place)
        made.append(w)
    return queues, made


def test_a_request_enters_its_place_with_its_cost() -> None:
    queues, (a, b) = entered(MAIN, "a", "b", deadline=9.0)
    assert (len(queues), queues.main_cost, a.place) == (2, 4.0, MAIN)
    assert [item[3] for item in queues.main] == [a, b]
    assert [item[:2] for item in queues.main] == [(0, 5.0), (0, 5.0)]
    assert [item[:2] for item in queues.valued[""]] == [(0, -5.0), (0, -5.0)]
    assert [item[:2] for item in queues.expiry] == [(5.0, 0.0), (5.0, 0.0)]
    assert queues.deferred == []
    assert queues.waiting == {"a": a, "b": b}


def test_one_without_a_limit_never_expires() -> None:
    queues, _ = entered(MAIN, "a")
    assert queues.expiry == []
    assert queues.expire(99.0) == 0


def test_priority_comes_before_slack_and_before_value() -> None:
    queues = Queues()
    for key, priority, latest, cost in (("a", 0, 1.0, 1.0), ("b", 1, 9.0, 5.0), ("c", 0, 2.0, 0.5)):
        queues.enter(waiting(key, latest=latest, cost=cost, priority=priority), MAIN)
    assert [item[3].request.id for item in sorted(queues.main)] == ["b", "a", "c"]
    assert [item[3].request.id for item in sorted(queues.valued[""])] == ["b", "c", "a"]
    queues = Queues()
    for key, priority, cost in (("a", 0, 1.0), ("b", 1, 5.0), ("c", 0, 0.5)):
        queues.enter(waiting(key, cost=cost, priority=priority), DEFERRED)
    assert [item[3].request.id for item in sorted(queues.deferred)] == ["b", "c", "a"]
    assert queues.main_cost == 0.0


def test_tenants_have_heaps_of_their_own() -> None:
    queues = Queues()
    for key, tenant in (("a", "x"), ("b", "y"), ("c", "x")):
        queues.enter(waiting(key, tenant=tenant), MAIN)
    found = {t: [item[3].request.id for item in heap] for t, heap in queues.valued.items()}
    assert found == {"x": ["a", "c"], "y": ["b"]}


def test_moving_takes_the_cost_along() -> None:
    queues, (a, b) = entered(MAIN, "a", "b")
    queues.put(a, DEFERRED)
    assert (queues.main_cost, a.place, len(queues.deferred)) == (2.0, DEFERRED, 1)
    queues.put(a, MAIN)
    assert queues.main_cost == 4.0
    queues.put(b, LATE)
    assert (queues.main_cost, queues.late_count, queues.oldest_late()) == (2.0, 1, b)


def test_what_is_removed_is_gone_from_every_count() -> None:
    queues, (a, b, c) = entered(MAIN, "a", "b", "c")
    queues.put(b, LATE)
    queues.remove(a)
    assert (len(queues), queues.main_cost, a.place) == (2, 2.0, GONE)
    queues.remove(b)
    assert (queues.late_count, queues.oldest_late(), queues.main_cost) == (0, None, 2.0)
    queues.main_cost += 1e-12
    queues.remove(c)
    assert (len(queues), queues.main_cost) == (0, 0.0)


def test_requests_expire_once_their_slack_is_used_up() -> None:
    queues = Queues()
    made = [waiting(key, latest=at, deadline=99.0) for key, at in (("a", 1.0), ("b", 2.0))]
    queues.enter(made[0], MAIN)
    queues.enter(made[1], DEFERRED)
    gone = waiting("c", latest=1.0, deadline=99.0)
    queues.enter(gone, MAIN)
    queues.remove(gone)
    assert queues.expire(1.0) == 0, "not yet"
    assert queues.expire(1.5) == 1
    assert [w.place for w in made] == [LATE, DEFERRED]
    assert queues.expire(3.0) == 1
    assert (queues.late_count, queues.oldest_late(), queues.main_cost) == (2, made[0], 0.0)


def test_one_without_a_limit_that_waited_long_comes_before_all_its_tenant_has() -> None:
    queues, (a, b) = entered(MAIN, "a", "b", latest=5.0)
    dear = waiting("dear", cost=0.1, latest=9.0, deadline=20.0)
    queues.enter(dear, MAIN)
    assert queues.expire(5.0) == 0
    assert queues.valued[""][0][3] is dear
    assert queues.expire(5.1) == 0, "it is not late"
    assert [item[3] for item in sorted(queues.valued[""])][:3] == [a, b, dear]
    assert (a.place, queues.patience) == (MAIN, [])


def test_stale_entries_go_once_they_are_the_majority() -> None:
    queues, (w,) = entered(MAIN, "a", deadline=9.0)
    most = 2 + STALE_MAX
    while len(queues.main) < most:
        queues.put(w, DEFERRED)
        queues.put(w, MAIN)
    deferred = len(queues.deferred)
    queues.compact()
    assert (len(queues.main), len(queues.deferred)) == (most, deferred), "not more than the limit"
    queues.put(w, MAIN)
    queues.compact()
    assert [item[3] for item in queues.main] == [w], "once"
    before = len(queues.main)
    while len(queues.deferred) <= most:
        queues.put(w, DEFERRED)
    queues.put(w, MAIN)
    queues.compact()
    assert queues.deferred == [], "it waits elsewhere"
    assert len(queues.main) == before + 1
    assert len(queues.expiry) == 1
    queues.put(w, DEFERRED)
    for _ in range(most):
        queues._push(queues.main, 0.0, 0.0, w)
        queues._push(queues.valued[""], 0.0, 0.0, w)
        queues._push(queues.expiry, 0.0, 0.0, waiting("gone", latest=0.0))
    queues.compact()
    assert queues.main == []
    assert queues.valued == {}, "a tenant without entries is forgotten"
    assert [item[3] for item in queues.expiry] == [w]


def test_what_is_left_after_compaction_is_still_a_heap() -> None:
    queues, made = entered(MAIN, *(f"q{n}" for n in range(90)), deadline=99.0)
    for n, w in enumerate(made):
        w.latest = float(90 - n)
    queues.main.clear()
    for w in made:
        queues._push(queues.main, 0.0, w.latest, w)
    for w in made[1::2]:
        queues.remove(w)
    queues.main += [(9.0, 9.0, 1000 + n, waiting("gone")) for n in range(200)]
    queues.compact()
    assert len(queues.main) == 45
    assert queues.main[0][3] is made[88]


# ------------------------------------------------------------ shares


def test_a_token_of_an_answer_costs_twice_one_of_a_prompt() -> None:
    shares = TokenShares()
    shares.enter("a")
    assert not shares.several
    shares.charge("a", 100, 10)
    assert shares.counter("a") == 0.0, "alone there is nothing to share"
    shares.enter("b")
    assert shares.several
    shares.charge("a", 100, 10)
    assert (shares.counter("a"), shares.counter("b")) == (120.0, 0.0)
    shares.charge("a", 1, 1)
    assert shares.counter("a") == 123.0
    shares.charge("away", 5, 0)
    assert shares.counter("away") == 5.0


def test_an_answer_is_charged_with_the_tokens_that_it_had() -> None:
    shares = TokenShares()
    for tenant in ("a", "b", "c"):
        shares.enter(tenant)
    charged = shares.charge("a", 100, 50)
    shares.settle("a", charged, 0, 20 - 50)
    assert shares.counter("a") == 100 + 2 * 20
    shares.settle("a", 0, 0, 99.0)
    assert shares.counter("a") == 140.0, "it was not charged"
    for tenant in ("a", "b", "c"):
        shares.leave(tenant)
    for tenant in ("a", "b"):
        shares.enter(tenant)
    shares.settle("a", charged, 0, 99.0)
    assert shares.counter("a") == 0.0, "those counters are forgotten"


def test_who_comes_back_starts_no_lower_than_the_least_of_those_here() -> None:
    shares = TokenShares()
    for tenant in ("a", "b"):
        shares.enter(tenant)
    shares.charge("a", 50, 0)
    shares.charge("b", 30, 0)
    shares.enter("c")
    assert shares.counter("c") == 30.0
    shares.enter("a")
    assert shares.counter("a") == 50.0, "it never left"
    shares.charge("c", 40, 0)
    shares.leave("c")
    shares.enter("c")
    assert shares.counter("c") == 70.0, "it had more than the least already"


def test_counters_are_forgotten_once_nobody_waits() -> None:
    shares = TokenShares()
    for tenant in ("a", "a", "b"):
        shares.enter(tenant)
    shares.charge("a", 50, 0)
    shares.leave("a")
    assert shares.several, "one of its two still waits"
    shares.leave("a")
    assert not shares.several
    assert shares.counter("a") == 50.0
    shares.charge("a", 1, 0)
    assert shares.counter("a") == 51.0, "known counters go on"
    shares.leave("b")
    assert shares.counter("a") == 0.0
    shares.leave("b")
    shares.enter("b")
    assert not shares.several
