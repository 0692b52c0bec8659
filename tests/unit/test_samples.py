"""Samples of the metrics stream that cannot be read."""

from __future__ import annotations

import logging

import pytest

from shared.messages import BODY, UtilSample, encode
from shared.tail import SampleReader


def test_a_damaged_sample_is_passed_over_and_only_the_first_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = SampleReader()
    good = UtilSample(replica="r", time=1.0, utilisation=0.5, queued=0, b=1.0, source="step_share")
    with caplog.at_level(logging.ERROR):
        assert reader.read("1-0", {BODY: b"\xc1"}) is None
        assert reader.read("2-0", {}) is None
        assert reader.read("3-0", {BODY: encode(good)}) == good
    assert [r.getMessage().split(" cannot")[0] for r in caplog.records] == ["sample 1-0"]
