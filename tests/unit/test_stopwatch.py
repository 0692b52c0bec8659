"""Stages of a piece of work, and how events carry them."""

from __future__ import annotations

import pytest

from shared.stopwatch import Stopwatch, from_words, in_words


def test_a_stage_that_comes_again_adds_up_and_one_that_fails_counts() -> None:
    watch = Stopwatch()
    with watch.stage("a"):
        pass
    first = watch.seconds["a"]
    with pytest.raises(RuntimeError), watch.stage("a"):
        raise RuntimeError
    watch.add("b", 1.5)
    assert watch.seconds["a"] > first >= 0
    assert list(watch.seconds) == ["a", "b"]


def test_words_come_back_as_numbers() -> None:
    seconds = {"prepare": 0.25, "evaluate": 12.0}
    assert from_words(in_words(seconds)) == seconds
    assert from_words("") == {}
    with pytest.raises(ValueError, match="could not convert"):
        from_words("prepare=soon")
