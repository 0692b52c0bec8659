"""Which Serving replicas may go Idle: the paper's rule, and a guard for the load that remains.

Source: CoLLM (arXiv 2604.16400), idle detection; the guard is this project's. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from services.launcher.windows import Load, quantile

NO_QUEUE = 0.05  # mean queued requests below which a queue counts as empty


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Switches of one tick; a replica below both goes Idle."""

    utilisation: float
    second: float  # of queued requests, or of b when queues are empty everywhere
    by: str  # "queued" | "b"

    def below(self, load: Load) -> bool:
        second = load.queued if self.by == "queued" else load.b
        return load.utilisation < self.utilisation and second < self.second


class Floors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """U^L, q^L, b^L and the quantile alpha_q."""

    utilisation: float = 0.25
    queued: float = 1.0
    b: float = 1.0
    share: float = 0.3


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A Serving replica with a full window."""

    id: str
    load: Load


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second of a dispatchable replica; infinite while nothing is known."""

    id: str
    rate: float


def thresholds(loads: Sequence[Load], floors: Floors) -> Thresholds:
    """U^switch = max(U^L, quantile of U), q^switch likewise; b in its place without queues."""
    by = "b" if all(load.queued < NO_QUEUE for load in loads) else "queued"
    second = [load.b if by == "b" else load.queued for load in loads]
    floor = floors.b if by == "b" else floors.queued
    return Thresholds(
        utilisation=max(floors.utilisation, quantile([x.utilisation for x in loads], floors.share)),
        second=max(floor, quantile(second, floors.share)),
        by=by,
    )


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one candidate, with the numbers behind it."""

    id: str
    idle: bool
    why: Mapping[str, float | str]


def judge(
    candidates: Sequence[Candidate],
    capacities: Sequence[Capacity],
    *,
    floors: Floors,
    rate: float,
    headroom: float,
    guarded: bool,
    completes: Mapping[str, float],
) -> list[Verdict]:
    """A verdict for each candidate below the thresholds, least utilised first.

    ``capacities`` are those of all dispatchable replicas of the model; ``rate`` is lambda-hat;
    ``completes`` names the replicas that would complete a session by going Idle now, with the
    rate its members (that replica and the Idle ones that wait) would carry while they train.
    After the first that completes one the caller decides anew: the rest wait for the next tick.
    """
    if not candidates:
        return []
    switch = thresholds([c.load for c in candidates], floors)
    left = {c.id: c.rate for c in capacities}
    needed = (1 + headroom) * rate
    verdicts = []
    for candidate in sorted(candidates, key=lambda c: (c.load.utilisation, c.load.b, c.id)):
        if not switch.below(candidate.load):
            continue
        rest = sum(r for name, r in left.items() if name != candidate.id)
        session = completes.get(candidate.id)
        carried = rest + (session or 0.0)
        somebody = len(left) > 1 or session is not None
        passes = not guarded or (somebody and carried >= needed)
        verdicts.append(
            Verdict(
                id=candidate.id,
                idle=passes,
                why=_numbers(candidate.load, switch, carried, needed, passes),
            )
        )
        if passes:
            left.pop(candidate.id, None)
            if session is not None:
                break
    return verdicts


def _numbers(
    load: Load, switch: Thresholds, carried: float, needed: float, passes: bool
) -> dict[str, float | str]:
    numbers: dict[str, float | str] = {
        "U": round(load.utilisation, 4),
        "U_switch": round(switch.utilisation, 4),
        switch.by: round(load.queued if switch.by == "queued" else load.b, 3),
        f"{switch.by}_switch": round(switch.second, 3),
        "rest_carries": "unknown" if math.isinf(carried) else round(carried, 3),
        "needed": round(needed, 3),
    }
    if not passes:
        numbers["guard"] = "the rest could not carry the load"
    return numbers
