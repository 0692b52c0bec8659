"""The parts without Redis and processes: samples, slack, books, lag, settings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.replica.books import Books, Member
from services.replica.engines.base import EngineStatus, StepReport
from services.replica.lag import LagMeter
from services.replica.samples import SPACING, Sampler
from services.replica.settings import ReplicaSettings
from services.replica.slack import AHEAD, TOLERANCE, slack
from shared.messages import Finished
from shared.settings import SettingsError, load
from shared.slo import Slo
from tests.replica.harness import generate

STATUS = EngineStatus(running=1, waiting=0, kv_used=1, kv_total=10, b_limit=4, adapters={})


def sampler() -> Sampler:
    made = Sampler("replica-0", "m", emulated=True)
    made.restart("life")
    return made


def step(seconds: float = 0.03, b: int = 2, finished: tuple[Finished, ...] = ()) -> StepReport:
    return StepReport(seconds=seconds, b=b, decode_tokens=b, finished=finished)


def test_steps_of_one_kind_merge_and_others_do_not() -> None:
    s = sampler()
    for b in (2, 2, 2, 3):
        s.add(step(b=b), STATUS, 0, 1.0)
    first, second = s.take(100.0)
    assert (first.b, first.steps, first.decode_tokens) == (2, 3, 6)
    assert first.seconds == pytest.approx(0.09)
    assert (second.b, second.steps, second.seq) == (3, 1, 2)


def test_a_finished_request_is_told_at_once_other_samples_wait() -> None:
    s = sampler()
    s.add(step(), STATUS, 0, 100.0)
    assert s.take(100.0)
    s.add(step(), STATUS, 0, 100.01)
    assert not s.take(100.01)
    s.add(step(finished=(Finished("r", 1, 4, 5, "stop"),)), STATUS, 0, 100.02)
    assert [f.id for x in s.take(100.02) for f in x.finished] == ["r"]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 0.1),
            st.integers(0, 4),
            st.integers(0, 2),
            st.booleans(),
            st.floats(0, 0.1),
        )
    )
)
def test_no_step_token_or_request_is_lost_in_merging(
    steps: list[tuple[float, int, int, bool, float]],
) -> None:
    s, now, taken = sampler(), 0.0, []
    for i, (seconds, b, B, ends, pause) in enumerate(steps):
        now += pause
        finished = (Finished(str(i), 1, 1, 1, "stop"),) if ends else ()
        s.add(step(seconds, b, finished), STATUS, B, now)
        taken += s.take(now)
    taken += s.take(now + 2 * SPACING)
    assert sum(x.steps for x in taken) == len(steps)
    assert sum(x.decode_tokens for x in taken) == sum(b for _, b, *_ in steps)
    assert sum(x.seconds for x in taken) == pytest.approx(sum(x for x, *_ in steps))
    ends = [str(i) for i, (*_, ends, _) in enumerate(steps) if ends]
    assert [f.id for x in taken for f in x.finished] == ends
    assert [x.seq for x in taken] == list(range(1, len(taken) + 1))


def member(**changes: object) -> Member:
    return Member(generate("r", arrival=100.0, **changes), b"1-1", 100.0, 100.0)


def test_nothing_running_has_endless_slack() -> None:
    assert slack((), 0.0, 0.1) == math.inf


def test_slack_is_what_the_deadline_leaves_after_the_tokens_still_to_come() -> None:
    one = member(tokens=10, deadline=105.0, slo=Slo(e2e_ms=5000))
    one.first_token, one.delivered = 101.0, 4
    assert slack([one], 102.0, 0.1) == pytest.approx(105 - 102 - 6 * 0.1)


def test_the_least_of_all_limits_counts() -> None:
    loose = member(tokens=10, deadline=200.0)
    tight = member(tokens=10, slo=Slo(ttft_ms=1000))
    assert slack([loose, tight], 100.5, 0.1) == pytest.approx(101 - 100.5 - 0.1)


def test_a_request_without_limits_bears_a_quarter_more_time_per_token() -> None:
    one = member(tokens=100)
    one.first_token, one.delivered = 100.0, 1
    bearable = 0.1 * (1 + TOLERANCE)
    assert slack([one], 100.0, 0.1) == pytest.approx((1 + AHEAD) * bearable - AHEAD * 0.1)
    # It has been slowed by all it bears: nothing is left.
    one.delivered = 50
    assert slack([one], 100.0 + 51 * 0.1 * 1.5, 0.1) < 0


def test_a_request_without_limits_may_become_as_slow_as_slow_ones_are_without_training() -> None:
    one = member(tokens=100)
    one.first_token, one.delivered = 100.0, 20
    now = 100.0 + 20 * 0.15
    assert slack([one], now, 0.1) < 0
    assert slack([one], now, 0.1, usual=0.16) > 0.1
    # A step that is slower than slow requests were is what counts then.
    assert slack([one], now, 0.2, usual=0.16) == slack([one], now, 0.2)


def test_an_answer_that_ends_early_has_not_spent_what_its_end_would_have_left() -> None:
    """Slack over all of max_tokens let an answer of 8 tokens wait for a whole one of 1000."""
    one = member(tokens=1000, slo=Slo(tpot_ms=200))
    one.first_token, one.delivered = 100.0, 1
    delay = slack([one], 100.0, 0.1)
    assert delay > 0
    assert (delay + AHEAD * 0.1) / (1 + AHEAD) <= 0.2 + 1e-9


def test_an_entry_is_settled_with_its_last_member() -> None:
    books = Books()
    books.expect(b"1-1", 2)
    books.expect(b"2-1", 1)
    assert not books.settle(b"1-1")
    assert books.settle(b"2-1")
    assert not books.empty
    assert books.settle(b"1-1")
    assert books.empty
    assert not books.settle(b"1-1")


def test_lag_is_told_at_its_99th_percentile() -> None:
    meter = LagMeter()
    for _ in range(200):
        meter.add(0.0005, 0.02)
    assert meter.p99() == pytest.approx(0.025)
    for _ in range(10):
        meter.add(0.01, 0.02)
    assert meter.p99() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"engine": "torch"}, "model_path"),
        ({"engine": "emulated", "id": "a b"}, "letters"),
        ({"engine": "emulated", "ids": ["a", "a"]}, "twice"),
        ({"engine": "emulated", "b": 9, "b_max": 8}, "above b_max"),
        ({"engine": "torch", "model_path": "x", "ids": ["a", "b"]}, "emulated"),
    ],
)
def test_bad_settings_are_refused_and_named(values: dict[str, object], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        load(ReplicaSettings, {}, **values)
