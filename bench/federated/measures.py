"""What is computed from a system's records: overheads, fits, goodput by quality."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.federated.system import Answered, System
from services.coordinator.fit import Sample, fit
from shared.adapters import AdapterVersion
from shared.messages import StepSample
from shared.stopwatch import from_words

LEAST_CE = 0.05  # nats per token: quality = 1 / max(CE, this)


def first_step(system: System) -> dict[str, Any]:
    """Seconds from the moment that the cluster was idle and held data (the later of its last
    member's going Idle and its last file) to the first training step, and from the opening of
    the session to it; and what lay between those two."""
    opened = system.events("session_opened")[0]
    at = float(opened["at"])
    idle = [float(e["at"]) for e in system.events("state") if e["to"] == "idle"]
    held = [float(e["at"]) for e in system.events("data_stored") if e["ok"] == "1"]
    ready = max(t for t in (*idle, *held) if t <= at + 0.5)
    first = system.events("first_step")[0]
    taken = float(first["seconds"])
    stages = {"launcher": round(at - ready, 3), **from_words(first["stages"])}
    return {
        "from_idle": round(at - ready + taken, 3),
        "from_session": round(taken, 3),
        "stages": stages,
    }


def rounds(system: System) -> list[dict[str, Any]]:
    """Each finished round's figures, as its event tells them."""
    found = []
    for event in system.events("round_done"):
        found.append(
            {
                "round": int(event["round"]),
                "at": float(event["at"]),
                "loss": float(event["loss"]),
                "heldout": _number(event["heldout"]),
                "heldout_before": float(event["heldout_before"])
                if event["heldout_before"]
                else None,
                "micro_steps": int(event["micro_steps"]),
                "stages": from_words(event["stages"]),
                "slowest": from_words(event["slowest"].partition(":")[2]),
                "seconds": float(event["seconds"]),
                "overhead": float(event["overhead"]),
                "exchange": event["exchange"],
                "exchange_mb": int(event["exchange_bytes"]) / 1e6,
                "exchange_s": float(event["exchange_seconds"]),
                "aggregation_error": float(event["aggregation_error"] or "nan"),
                "used": event["used"].split(","),
            }
        )
    return found


def fit_error(samples: Sequence[StepSample], least: int = 8) -> dict[str, Any]:
    """Predicted against measured decode iterations, each pair (b, B) left out of its own fit.

    Only steps without prefill; a pair counts with at least ``least`` samples, and all pairs need
    at least two values of b and of B. ``median_error_plane`` is that of the paper's plane.
    """
    cells: dict[tuple[int, int], list[Sample]] = {}
    for s in samples:
        if s.prefill_tokens == 0 and s.b > 0 and s.seconds > 0:
            step = Sample(s.time, s.b, s.B, s.seconds / max(1, s.steps))
            cells.setdefault((s.b, s.B), []).append(step)
    cells = {pair: found for pair, found in cells.items() if len(found) >= least}
    pairs, errors, of_planes = [], list[float](), list[float]()
    for pair, found in sorted(cells.items()):
        rest = [s for other, more in cells.items() if other != pair for s in more[-64:]]
        now = found[-1].time
        best = fit(rest, now, half_life=1e9, shaped=True)
        plain = fit(rest, now, half_life=1e9)
        if best is None or plain is None or not (best.observed_x and best.observed_y):
            continue
        measured, predicted = float(np.median([s.seconds for s in found])), best(*pair)
        errors.append(abs(predicted - measured) / measured)
        of_planes.append(abs(plain(*pair) - measured) / measured)
        pairs.append({"pair": pair, "measured": measured, "predicted": predicted,
                      "plane": plain(*pair), "samples": len(found)})  # fmt: skip
    every = [s for found in cells.values() for s in found[-64:]]
    whole = fit(every, max((s.time for s in every), default=0.0), half_life=1e9, shaped=True)
    return {
        "pairs": pairs,
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "median_error_plane": round(statistics.median(of_planes), 4) if of_planes else None,
        "shape": None if whole is None else {"flat": whole.flat, "cross": whole.cross},
        "r2": None if whole is None else round(whole.r2, 4),
        "r2_single": None if whole is None else round(whole.r2_single, 4),
    }


def q_goodput(
    answers: Sequence[Answered], versions: Sequence[AdapterVersion], slo: float, seconds: float
) -> dict[str, float | None]:
    """Tokens of answers within ``slo`` seconds, plain and times quality, per second.

    The latter is None before any version's loss is known.

    Quality of an answer = 1 / CE of the common version that served it, on the clients' held-out
    data; a replica's own version between rounds counts as the round's parent.
    """
    ce = {v.version: v.heldout_ce for v in versions if v.heldout_ce is not None}
    order = sorted((v for v in versions if v.heldout_ce is not None), key=lambda v: v.round)

    def quality(version: str) -> float:
        known = ce.get(version)
        if known is None and order:
            number = int(version[1:].split(".")[0]) if version.startswith("r") else 0
            before = [v for v in order if v.round < number] or order[:1]
            known = before[-1].heldout_ce
        return 1 / max(known, LEAST_CE) if known is not None else 0.0

    kept = [a for a in answers if a.tokens > 0 and a.seconds <= slo]
    return {
        "goodput": round(sum(a.tokens for a in kept) / seconds, 3),
        "q_goodput": round(sum(a.tokens * quality(a.version) for a in kept) / seconds, 4)
        if ce
        else None,
        "attainment": round(len(kept) / max(1, len(answers)), 4),
        "answers": len(answers),
    }


def exchange(found: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Medians of a round's megabytes and seconds on one path."""
    if not found:
        return None
    megabytes = statistics.median(f["exchange_mb"] for f in found)
    seconds = statistics.median(f["exchange_s"] for f in found)
    return {"mb": round(megabytes, 3), "s": round(seconds, 4)}


def _number(text: str) -> float | None:
    return float(text) if text else None
