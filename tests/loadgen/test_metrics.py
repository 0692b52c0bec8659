"""Numbers from observations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.metrics import (
    Outcome,
    apply_quality,
    by_second,
    client_health,
    peak_concurrency,
    summarise,
)
from shared.slo import Slo, parse


def answered(index: int = 0, **changes: object) -> Outcome:
    values = {
        "index": index,
        "sent": 1.0,
        "ready": 1.0,
        "due": 1.0,
        "first_token": 1.2,
        "finished": 2.2,
        "output_tokens": 11,
        "input_tokens": 5,
        "gaps": [0.1] * 10,
        "counted_by": "usage",
        "status": 200,
    }
    return Outcome(**{**values, **changes})  # type: ignore[arg-type]


def test_latencies_follow_their_definitions() -> None:
    result = summarise([answered()], 10.0, {})
    assert result["p50_ttft_ms"] == pytest.approx(200)
    assert result["p99_tpot_ms"] == pytest.approx(100)  # the first token is not counted
    assert result["p99_e2el_ms"] == pytest.approx(1200)
    assert result["mean_itl_ms"] == pytest.approx(100)
    assert result["output_throughput"] == pytest.approx(1.1)


def test_goodput_counts_only_answers_that_meet_every_limit() -> None:
    outcomes = [answered(0), answered(1, first_token=1.9, gaps=[0.03] * 10)]
    result = summarise(outcomes, 10.0, {"": Slo(ttft_ms=300, e2e_ms=5000)})
    assert result["goodput_tokens_per_s"] == pytest.approx(1.1)
    assert result["request_goodput"] == pytest.approx(0.1)
    assert result["slo_attainment"] == 0.5


def test_a_tail_of_late_answers_does_not_count_as_time_of_good_ones() -> None:
    limit = {"": Slo(e2e_ms=2000)}
    late = answered(1, sent=3.0, finished=40.0)
    result = summarise([answered(0), late], 40.0, limit)
    assert result["active_duration"] == pytest.approx(3.0), "its arrival counts"
    assert result["active_goodput_tokens_per_s"] == pytest.approx(11 / 3)
    assert result["goodput_tokens_per_s"] == pytest.approx(11 / 40)
    good = answered(2, sent=3.5, finished=5.0)
    result = summarise([answered(0), late, good], 40.0, limit)
    assert result["active_duration"] == pytest.approx(5.0)
    assert result["active_goodput_tokens_per_s"] == pytest.approx(22 / 5)
    assert summarise([], 1.0, limit)["active_goodput_tokens_per_s"] == 0.0


def test_failed_and_refused_requests_stay_in_the_denominator() -> None:
    outcomes = [
        answered(0),
        answered(1, error="HTTP 500", output_tokens=0),
        answered(2, error="HTTP 503", refused=True, output_tokens=0),
        answered(3, error="cut", output_tokens=4),
    ]
    result = summarise(outcomes, 10.0, {})
    assert (result["completed"], result["failed"], result["shed"]) == (1, 2, 1)
    assert result["slo_attainment"] == 0.25
    assert result["total_output_tokens"] == 11


def test_each_tag_has_its_own_slo() -> None:
    slos = parse(["code/e2el:1s", "e2e:5000"])
    outcomes = [answered(0, tag="code"), answered(1, tag="conv")]
    assert summarise(outcomes, 10.0, slos)["slo_attainment"] == 0.5


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 50)), max_size=40))
def test_every_request_is_counted_exactly_once(kinds: list[tuple[bool, bool, int]]) -> None:
    outcomes = [
        answered(k, error=None if ok else "x", refused=refused and not ok, output_tokens=tokens)
        for k, (ok, refused, tokens) in enumerate(kinds)
    ]
    result = summarise(outcomes, 1.0, {})
    assert result["completed"] + result["failed"] + result["shed"] == len(outcomes)
    seconds = by_second(outcomes, {})
    assert sum(seconds["offered"]) == len(outcomes)
    assert sum(seconds["completed"]) == result["completed"]
    assert seconds["in_flight"][-1] == 0 or outcomes == [] or seconds["in_flight"][-1] >= 0


def test_tokens_are_counted_in_the_second_they_arrived() -> None:
    seconds = by_second([answered(gaps=[0.5, 0.5], output_tokens=3, finished=2.2)], {})
    assert seconds["output_tokens"] == [0, 2, 1]
    assert seconds["goodput_tokens"] == [0, 0, 3]


def test_an_empty_run_has_no_numbers_and_no_error() -> None:
    result = summarise([], 1.0, {})
    assert result["slo_attainment"] is None
    assert result["p99_ttft_ms"] is None


def test_peak_concurrency_counts_overlap() -> None:
    outcomes = [answered(0), answered(1, sent=1.5), answered(2, sent=3.0, finished=4.0)]
    assert peak_concurrency(outcomes) == 2


def test_a_client_that_falls_behind_says_so() -> None:
    kept = [answered(k, due=k * 0.1, ready=k * 0.1 + 0.001, sent=k * 0.1) for k in range(50)]
    assert not client_health(kept, 5.0)["client_behind"]
    late = [answered(k, due=k * 0.1, ready=k * 0.2, sent=k * 0.2) for k in range(50)]
    health = client_health(late, 5.0)
    assert health["client_behind"]
    assert health["client_lag_p99_ms"] > 4000


def test_quality_weighs_good_tokens_and_states_its_coverage() -> None:
    rows = [
        {"index": 0, "error": None, "good": True, "output_tokens": 10},
        {"index": 1, "error": None, "good": False, "output_tokens": 10},
        {"index": 2, "error": None, "good": True, "output_tokens": 10},
        {"index": 3, "error": "x", "good": False, "output_tokens": 0},
    ]
    result = {"requests": rows, "duration": 2.0}
    apply_quality(result, {0: 0.5, 1: 0.5})
    assert result["q_goodput"] == pytest.approx(10 / 0.5 / 2.0)
    assert result["quality_coverage"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:5", "e2el:-1", "e2el:0", "e2el:inf?"])
def test_a_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SLO"):
        parse([text])
