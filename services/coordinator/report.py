"""What a finished round tells: one event with all its numbers, and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.coordinator.checking import Check
from services.coordinator.context import Context
from shared.adapters import AdapterVersion
from shared.rounds import AggregateResult, RoundResult
from shared.sessions import Session
from shared.stopwatch import in_words


@dataclass(frozen=True)
class Outcome:
    """A round's parts: what clients reported, what the server made, what became of it."""

    results: Mapping[str, RoundResult]
    made: AggregateResult
    checked: Check
    entry: AdapterVersion
    promoted: bool
    loss: float | None  # F of the round
    rounds: int  # at most, of the session
    stages: Mapping[str, float]  # seconds of the round so far, as the coordinator saw them


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of a round. Overhead: the share that is not training on any client."""

    seconds: float
    overhead: float
    exchange_bytes: int
    exchange_seconds: float


def cost(session: Session, outcome: Outcome, now: float) -> Cost:
    """The slowest client's training (yielding included) against the whole round. Pure."""
    seconds, results = now - session.started, outcome.results.values()
    busy = stepping(slowest(outcome))
    made = outcome.made
    return Cost(
        seconds=seconds,
        overhead=max(0.0, 1 - busy / seconds) if seconds > 0 else 0.0,
        exchange_bytes=made.exchange_bytes + sum(r.exchange_bytes for r in results),
        exchange_seconds=made.exchange_seconds + max(r.exchange_seconds for r in results),
    )


def slowest(outcome: Outcome) -> RoundResult:
    """The client whose steps took longest."""
    return max(outcome.results.values(), key=stepping)


def stepping(result: RoundResult) -> float:
    """Seconds of a client's optimiser steps: micro-steps, their waits, and the updates."""
    return result.train_seconds + result.wait_seconds + result.parts.get("update", 0.0)


def stages_of(result: RoundResult) -> dict[str, float]:
    """Where a client's job spent its time; ``other`` is what no stage names."""
    found = {"train": result.train_seconds, "wait": result.wait_seconds, **result.parts}
    return {**found, "other": max(0.0, result.seconds - sum(found.values()))}


async def tell_round(
    context: Context, session: Session, outcome: Outcome, privacy: Mapping[str, str | float]
) -> None:
    """Event ``round_done``; ``privacy`` are the fields about the budget spent, if any."""
    paid = cost(session, outcome, context.now())
    _measure(context, session, outcome, paid)
    context.telemetry.round_ended(session.adapter, paid.overhead * paid.seconds)
    made, checked, entry = outcome.made, outcome.checked, outcome.entry
    await context.tell(
        "round_done",
        session,
        version=entry.version,
        promoted="yes" if outcome.promoted else "no",
        why=checked.why,
        loss=_text(outcome.loss),
        heldout_before=_text(checked.before),
        heldout=_text(checked.after),
        quality=round(entry.quality, 4),
        used=",".join(made.used),
        rejected="; ".join(f"{c}: {why}" for c, why in made.rejected.items()),
        aggregation_error=_text(made.aggregation_error),
        seconds=round(paid.seconds, 3),
        overhead=round(paid.overhead, 4),
        exchange=made.exchange,
        exchange_bytes=paid.exchange_bytes,
        exchange_seconds=round(paid.exchange_seconds, 4),
        tokens=sum(r.tokens for r in outcome.results.values()),
        done=session.done + 1,
        of=outcome.rounds,
        steps=",".join(f"{c}:{r.steps}" for c, r in sorted(outcome.results.items())),
        micro_steps=max(r.micro_steps for r in outcome.results.values()),
        stages=in_words(outcome.stages),
        slowest=f"{slowest(outcome).client}: {in_words(stages_of(slowest(outcome)))}",
        **privacy,
    )


def _measure(context: Context, session: Session, outcome: Outcome, paid: Cost) -> None:
    meters, made, adapter = context.meters, outcome.made, session.adapter
    meters.overhead.observe(paid.overhead)
    meters.exchange_bytes.labels(made.exchange).inc(paid.exchange_bytes)
    meters.exchange_seconds.labels(made.exchange).inc(paid.exchange_seconds)
    meters.quality.labels(adapter).set(outcome.entry.quality)
    for gauge, value in (
        (meters.error, made.aggregation_error),
        (meters.loss, outcome.loss),
        (meters.heldout, outcome.checked.after),
    ):
        if value is not None:
            gauge.labels(adapter).set(value)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"
