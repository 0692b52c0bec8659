"""What a token would take without training, learnt beside it."""

from __future__ import annotations

import random

import pytest

from services.replica.solo_pace import LEAST, Mark, SoloPace

BASE, SEQUENCE, TOKEN = 0.020, 0.001, 0.0005  # seconds


def turn(b: int, prompt: int) -> float:
    return BASE + SEQUENCE * b + TOKEN * prompt


class Load:
    """Serving requests of 32 prompt and 32 answer tokens, turn by turn."""

    def __init__(self, slow: float, every: int) -> None:
        """Every ``every``th turn takes ``slow`` times as long: training runs beside it."""
        self.pace, self._slow, self._every = SoloPace(), slow, every
        self.times: list[float] = []

    def run(self, seconds: float, rate: float) -> None:
        rng, now, due, number = random.Random(0), 0.0, 0.0, 0
        running: list[tuple[int, Mark, float]] = []
        while now < seconds:
            prompt = 0
            while due <= now:
                due += rng.expovariate(rate)
                prompt += 32
            number += 1
            beside = number % self._every != 0
            took = turn(len(running), prompt) * (self._slow if beside else 1.0)
            now += took
            self.pace.turn(took, len(running), prompt, alone=not beside)
            for made, since, first in running:
                if made == 31:
                    self.times.append((now - first) / 31)
                    self.pace.finished(since)
            running = [(m + 1, s, f) for m, s, f in running if m < 31]
            running += [(0, self.pace.mark(), now)] * (prompt // 32)


def test_nothing_is_known_before_requests_have_ended() -> None:
    pace = SoloPace()
    assert pace.limit is None
    assert pace.step == 0
    for _ in range(LEAST):
        pace.finished(Mark(0.0, 0.0))
    assert pace.limit is None


def test_the_limit_is_what_slow_requests_take_without_training() -> None:
    load = Load(1.0, 1)
    load.run(80, 5)
    slow = sorted(load.times)[int(0.9 * len(load.times))]
    assert load.pace.limit == pytest.approx(slow, rel=0.15)
    assert BASE < load.pace.step < slow


def test_training_beside_most_turns_does_not_raise_its_own_limit() -> None:
    """Time per token as it is beside training is half as long again and more."""
    alone, beside = Load(1.0, 1), Load(1.8, 4)
    alone.run(80, 5)
    beside.run(80, 5)
    assert min(beside.times) > 1.3 * min(alone.times)
    assert beside.pace.limit is not None
    assert alone.pace.limit is not None
    assert beside.pace.limit == pytest.approx(alone.pace.limit, rel=0.15)


def test_one_turn_in_which_the_host_did_something_else_is_not_believed() -> None:
    load = Load(1.0, 1)
    load.run(30, 5)
    before = load.pace.step
    load.pace.turn(5.0, 4, 0, alone=True)
    for _ in range(20):
        load.pace.turn(turn(4, 0), 4, 0, alone=True)
    assert load.pace.step < 1.5 * before
