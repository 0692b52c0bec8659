"""Moments as commands show and read them."""

from __future__ import annotations

import datetime

import pytest

from collm.moments import BadMoment, since, stamp

NOW = datetime.datetime(2026, 3, 2, 12, tzinfo=datetime.UTC).timestamp()


def test_a_moment_of_today_is_a_time_and_any_other_has_its_date() -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert stamp(now.timestamp() * 1000, utc=True) == now.strftime("%H:%M:%S.%f")[:-3] + "Z"
    assert stamp((NOW + 0.25) * 1000, utc=True) == "2026-03-02 12:00:00.250Z"
    local = datetime.datetime.fromtimestamp(NOW).strftime("%Y-%m-%d %H:%M:%S.000")
    assert stamp(NOW * 1000) == local


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("90s", 90),
        ("1.5m", 90),
        ("2h", 7200),
        ("1d", 86400),
        ("2026-03-02T11:59:00Z", 60),
        ("2026-03-02T12:59+01:00", 60),
    ],
)
def test_since_is_a_time_ago_or_a_moment(text: str, ago: float) -> None:
    assert since(text, NOW) == pytest.approx(NOW - ago)


def test_a_time_without_a_zone_is_local_unless_utc_is_asked_for() -> None:
    assert since("2026-03-02T11:59", NOW, utc=True) == NOW - 60
    local = datetime.datetime.fromtimestamp(NOW - 60).isoformat()
    assert since(local, NOW) == NOW - 60


def test_text_that_is_no_moment_says_what_would_be_one() -> None:
    with pytest.raises(BadMoment, match=r"'yesterday' is no moment: .*2h.*2026"):
        since("yesterday", NOW)
