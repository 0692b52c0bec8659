"""Moments as a person reads and writes them."""

from __future__ import annotations

import datetime
import re

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BadMoment(ValueError):
    """Text that names no moment; says what would."""


def stamp(milliseconds: float, *, utc: bool = False) -> str:
    """Time of day to the millisecond; with its date unless that is today. Local time or UTC."""
    zone = datetime.UTC if utc else None
    moment = datetime.datetime.fromtimestamp(milliseconds / 1000, zone)
    text = moment.strftime("%H:%M:%S.%f")[:-3] + ("Z" if utc else "")
    if moment.date() == datetime.datetime.now(zone).date():
        return text
    return f"{moment.date().isoformat()} {text}"


def of_entry(entry_id: str) -> int:
    """Milliseconds of a stream entry, from its id."""
    return int(entry_id.split("-")[0])


def since(text: str, now: float, *, utc: bool = False) -> float:
    """Seconds since 1970 of ``2h`` (ago), or of an ISO date or time. Raises BadMoment.

    A time without a zone is local, or UTC with ``utc``. ``now``: seconds, as Redis counts them.
    """
    if ago := _AGO.fullmatch(text.strip()):
        return now - float(ago[1]) * _SECONDS[ago[2]]
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError as e:
        raise BadMoment(
            f"{text!r} is no moment: 90s, 30m, 2h or 1d ago expected, or a date or time such as "
            "2026-03-01T14:30, with Z or +01:00 for a zone"
        ) from e
    if moment.tzinfo is None and utc:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()
