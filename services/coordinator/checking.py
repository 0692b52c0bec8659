"""Whether a new version may be promoted: its held-out loss on every client's own data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from services.coordinator.context import Context
from services.coordinator.jobs import JobFailed, job_id
from services.coordinator.settings import TrainingOptions
from shared.rounds import EVALUATE, BadJob, EvaluateJob, EvaluateResult, RoundResult
from shared.sessions import Session

log = logging.getLogger(__name__)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out nats per token. ``good`` and ``why``: of the clients that measured both.

    ``before`` and ``after`` are what is reported: means over all clients that the session has
    measured, one that is absent with what it last had. Means over whoever is there would jump
    with each that comes or goes, as data differ more than versions do.
    """

    good: bool
    why: str
    before: float | None = None
    after: float | None = None
    before_of: dict[str, float] = {}
    after_of: dict[str, float] = {}


async def check(
    context: Context,
    session: Session,
    options: TrainingOptions,
    results: Mapping[str, RoundResult],
    parent: str,
    new: str,
) -> Check:
    """All clients that trained evaluate at once; one that cannot is left out of the mean.

    The parent only where neither an earlier check nor the client's round has measured it.
    """
    measured = {c: r.heldout_before for c, r in results.items() if r.heldout_before is not None}
    before, after = {**session.heldout, **measured}, dict[str, float]()
    wanted = {c: (new,) if c in before else (parent, new) for c in sorted(results)}
    found = await asyncio.gather(
        *(_evaluate(context, session, options, c, paths) for c, paths in wanted.items())
    )
    for result in found:
        if result is None:
            continue
        if len(result.ce) == 2 and result.ce[0] is not None:
            before[result.client] = result.ce[0]
        if result.ce[-1] is not None:
            after[result.client] = result.ce[-1]
    return verdict(before, after, options.margin, session.last_heldout)


def verdict(
    before: dict[str, float],
    after: dict[str, float],
    margin: float,
    last: Mapping[str, float] = MappingProxyType({}),
) -> Check:
    """Not good when the mean rose by more than ``margin`` (relative). Pure.

    Without any measurement there is nothing against a version. ``last``: what each client of
    the session, also one that is absent now, measured last.
    """
    reported = _mean({**last, **after}) if after else None
    both = sorted(before.keys() & after.keys())
    if not both:
        return Check(good=True, why="no held-out data", after=reported, after_of=after)
    old = sum(before[c] for c in both) / len(both)
    new = sum(after[c] for c in both) / len(both)
    good = new <= old * (1 + margin)
    sign = "within" if good else "beyond"
    return Check(
        good=good,
        why=f"held-out loss {old:.4f} -> {new:.4f}, {sign} the margin of {margin:g}",
        before=_mean({**last, **before}),
        after=reported,
        before_of=before,
        after_of=after,
    )


def _mean(losses: Mapping[str, float]) -> float:
    return sum(losses.values()) / len(losses)


async def _evaluate(
    context: Context,
    session: Session,
    options: TrainingOptions,
    client: str,
    paths: tuple[str, ...],
) -> EvaluateResult | None:
    job = EvaluateJob(
        client=client,
        adapter=session.adapter,
        paths=paths,
        heldout_fraction=options.heldout_fraction,
        max_tokens=options.max_tokens,
        max_samples=options.heldout_samples,
    )
    name = job_id(session.id, f"r{session.round}", f"a{session.attempt}", "check", client)
    limit = context.settings.job_seconds
    if await context.cluster.record(client) is None:
        return None
    try:
        return await context.jobs.run(client, name, EVALUATE, job, EvaluateResult, limit)
    except (JobFailed, BadJob, TimeoutError) as e:
        await context.tell("check_failed", session, replica=client, why=str(e) or "no answer")
        return None
