"""A short campaign over the whole system, and the judge itself: it must see what it looks for."""

import time
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign, Plan
from tests.chaos.judge import judge
from tests.chaos.load import Record
from tests.chaos.model import MODEL


class Parrot:
    """Golden answers without an engine: ten letters."""

    def text(self, prompt, tokens, adapter, version, path):
        return "abcdefghij"[:tokens]


def record(text: str, outcome: str = "answered", **changes) -> Record:
    now = time.monotonic()
    fields = {"model": MODEL, "prompt": (1,), "tokens": 10, "stream": True, "started": now}
    made = Record(number=1, **{**fields, **changes})
    made.text, made.outcome, made.ended = text, outcome, now + 1
    return made


def counts(*records: Record, deaths=()) -> tuple[int, int, int]:
    verdict = judge(records, Parrot(), {}, deaths)
    return verdict.lost, verdict.duplicated, verdict.wrong


def test_the_judge_passes_right_answers_and_prefixes_of_them():
    assert counts(record("abcdefghij"), record("abcd", "left"), record("", "error")) == (0, 0, 0)


def test_the_judge_sees_a_repeated_piece():
    assert counts(record("abcdefabcdefghij")) == (0, 1, 0)


def test_the_judge_sees_a_short_a_wrong_and_an_empty_answer():
    assert counts(record("abc"), record("abXdefghij"), record("")) == (0, 0, 3)


def test_the_judge_counts_what_never_ended_or_broke_off():
    assert counts(record("abc", "open"), record("abc", "broken")) == (2, 0, 0)


def test_the_judge_counts_a_gateway_that_cannot_be_reached_though_it_lives():
    refused = record("", "unreachable")
    assert counts(refused) == (1, 0, 0)
    assert counts(refused, deaths=[refused.started + 0.5]) == (0, 0, 0)


def test_a_stream_cut_by_the_gateways_own_death_is_not_lost():
    broken = record("abc", "broken")
    assert counts(broken, deaths=[broken.started + 0.5]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_doubled_or_wrong_in_a_minute_of_faults(tmp_path: Path):
    report = Campaign(tmp_path, Plan(seconds=60, every=3.0, workers=5)).run()
    print(report)
    assert report["violations"] == []
    assert (report["lost"], report["duplicated"], report["wrong"]) == (0, 0, 0)
    assert report["processes_left"] == []
    assert sum(report["faults"].values()) >= 12
    assert report["outcomes"]["answered"] > 100
