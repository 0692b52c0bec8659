"""Prompt tokens beside running answers: as many as the time allows, no more."""

from __future__ import annotations

import pytest

from services.replica.pace import LEAST_PREFILL, StepPace, beside_decodes
from shared.slo import Slo


def taught(step_seconds: float = 0.1) -> StepPace:
    """A step takes 20 ms and 1 ms a prompt token."""
    pace = StepPace(step_seconds)
    for tokens in (0, 64, 0, 128, 32):
        pace.learn(0.020 + 0.001 * tokens, tokens)
    return pace


def test_nothing_is_said_before_anything_was_seen() -> None:
    assert StepPace(0.1).budget([]) is None


def test_the_step_time_less_the_decodes_is_filled() -> None:
    assert taught().budget([Slo()]) == pytest.approx(80, abs=1)


def test_the_tightest_limit_on_time_per_token_counts() -> None:
    limits = [Slo(tpot_ms=500), Slo(tpot_ms=100), Slo(e2e_ms=10)]
    assert taught().budget(limits) == pytest.approx(30, abs=1)


def test_where_there_is_no_room_prompts_still_go_on() -> None:
    assert taught().budget([Slo(tpot_ms=10)]) == LEAST_PREFILL


def test_a_slow_machine_gives_prompts_three_quarters_of_a_step() -> None:
    """Steps without prompts of 90 ms left 10 ms of a limit of 100: for 16 tokens, not these 71."""
    assert beside_decodes(0.09, 0.0038, 0.1, []) == pytest.approx(3 * 0.09 / 0.0038, abs=1)
    assert beside_decodes(0.09, 0.0038, 0.1, [300.0]) == LEAST_PREFILL, "a named limit comes first"


def test_a_fast_step_with_prompts_does_not_make_tokens_free() -> None:
    pace = taught()
    for _ in range(50):
        pace.learn(0.001, 64)  # faster than the mean of steps without
    budget = pace.budget([])
    assert budget is not None
    assert budget < 1e6
