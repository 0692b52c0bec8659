"""What the soak calls growth."""

from __future__ import annotations

import pytest

from tests.chaos.soak import grows, slope

SECONDS = 1800.0
TIMES = [float(t) for t in range(0, 1800, 5)]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("descriptors gateway", [20.0 + t // 200 for t in TIMES], True),
        ("memory_mb gateway", [50.0 + t / 3600 * 30 for t in TIMES], True),
        ("memory_mb coordinator", [50.0 + t / 3600 * 15 for t in TIMES], True),
        ("memory_mb gateway", [50.0 + t / 3600 * 5 for t in TIMES], False),
        ("memory_mb gateway", [90.0 - 40.0 * (t < 800) for t in TIMES], False),  # while warming
        ("keys", [40.0 for _ in TIMES], False),
    ],
)
def test_what_surely_grows_more_than_is_allowed_grows(
    name: str, values: list[float], expected: bool
) -> None:
    found = slope(list(zip(TIMES, values, strict=True)), SECONDS)
    assert found is not None
    assert grows(name, found) is expected
