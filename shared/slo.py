"""Latency objectives of one request and whether a response met them.

A SLO is not a timeout: a late answer is delivered, it does not count as goodput.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Any of three limits in milliseconds; a response must meet all that are named."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return not (self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None)

    def deadline(self, arrival: float) -> float | None:
        """Moment of the end-to-end limit (seconds, the clock of ``arrival``)."""
        return None if self.e2e_ms is None else arrival + self.e2e_ms / 1e3

    def met(self, ttft: float | None, tpot: float | None, e2e: float | None) -> bool:
        """Whether latencies in seconds keep every named limit; a missing TTFT or E2E fails.

        A missing TPOT passes: an answer of one token has none.
        """
        if self.ttft_ms is not None and (ttft is None or ttft * 1e3 > self.ttft_ms):
            return False
        if self.e2e_ms is not None and (e2e is None or e2e * 1e3 > self.e2e_ms):
            return False
        return self.tpot_ms is None or tpot is None or tpot * 1e3 <= self.tpot_ms


_FIELDS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}


def parse(parts: Iterable[str]) -> dict[str, Slo]:
    """SLOs of a command line: ``[TAG/]NAME:VALUE`` each, e.g. ``ttft:200 code/e2el:1.5s``.

    NAME is ttft, tpot, e2el or e2e; VALUE a number of ms, or with the unit ms or s. Returns
    tag -> SLO ("" = every tag that is not named). Raises ValueError.
    """
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        tag, _, limit = part.rpartition("/")
        name, _, value = limit.partition(":")
        if name not in _FIELDS:
            raise ValueError(f"SLO {part!r}: [TAG/]NAME:MILLISECONDS with {', '.join(_FIELDS)}")
        number = value.removesuffix("ms").removesuffix("s")
        scale = 1e3 if value.endswith("s") and not value.endswith("ms") else 1.0
        try:
            limit_ms = float(number) * scale
        except ValueError as e:
            raise ValueError(f"SLO {part!r}: {value!r} is no number of ms (or 1.5s)") from e
        if not limit_ms > 0:
            raise ValueError(f"SLO {part!r}: the limit must be above 0")
        found.setdefault(tag, {})[_FIELDS[name]] = limit_ms
    return {tag: Slo(**limits) for tag, limits in found.items()}
