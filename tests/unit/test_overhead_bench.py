"""What the overhead bench adds up."""

from __future__ import annotations

import pytest

from bench.overhead import own, shares, spent


def test_a_process_that_began_between_two_readings_counts_whole() -> None:
    before = {("inference", 1): 10.0, ("collm", 2): 1.0, ("training", 3): 4.0}
    after = {("inference", 1): 16.0, ("collm", 2): 1.5, ("training", 4): 3.5}
    seconds = spent(before, after)
    assert seconds == {"inference": 6.0, "training": 3.5, "collm": 0.5}
    found = shares(seconds)
    assert found is not None
    assert found["collm"] == pytest.approx(0.05)
    assert sum(found.values()) == pytest.approx(1.0)


def test_what_the_system_costs_is_told_by_its_parts() -> None:
    before = {("inference", 1): 10.0, ("collm/gateway", 2): 1.0, ("collm/replicas", 3): 1.0}
    after = {
        ("inference", 1): 11.0,
        ("collm/gateway", 2): 1.5,
        ("collm/replicas", 3): 1.25,
        ("collm/replicas", 4): 0.5,
    }
    assert spent(before, after) == {"inference": 1.0, "training": 0.0, "collm": 1.25}
    assert own(before, after) == {"gateway": 0.5, "replicas": 0.75}


def test_nothing_computed_has_no_shares() -> None:
    assert shares(dict.fromkeys(("inference", "training", "collm"), 0.0)) is None
