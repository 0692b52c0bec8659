"""A round's result becomes version t+1: into the registry, onto replicas, into the session."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from services.coordinator.checking import Check
from services.coordinator.context import Context
from services.coordinator.opening import Opening
from services.coordinator.report import Outcome, tell_round
from shared import blobs
from shared.adapters import AdapterVersion, Conflict
from shared.quality import after_round, weighted_mean
from shared.rounds import AggregateResult, RoundResult
from shared.sessions import Phase, Session


async def publish(
    context: Context,
    opening: Opening,
    s: Session,
    results: dict[str, RoundResult],
    made: AggregateResult,
    checked: Check,
    stages: Mapping[str, float],
) -> Session:
    """The session with this round in its books, to be saved. Done twice it publishes once.

    ``stages``: seconds of the round so far by stage, for its event.
    """
    loss = weighted_mean([(r.loss, r.examples) for r in results.values()])
    before = s.loss
    if before is None:
        before = weighted_mean([(r.first_loss, r.examples) for r in results.values()])
    parent = await context.registry.version(s.adapter, s.parent)
    entry = AdapterVersion(
        version=s.version,
        path=made.path,
        parent=s.parent,
        quality=after_round(parent.quality, before, loss),
        round=s.round,
        session=s.id,
        heldout_ce=checked.after,
        loss=loss,
        note=checked.why,
    )
    promoted = await _enter(context, s, entry, checked)
    if promoted:
        serving = [r.id for r in (await context.cluster.live()).values() if r.model == s.base]
        await context.cluster.announce(s.adapter, entry, serving)
        await context.registry.prune(s.adapter, context.settings.keep_versions)
    await blobs.delete(context.redis, *(r.blob for r in results.values() if r.blob))
    await tell_round(
        context,
        s,
        Outcome(results, made, checked, entry, promoted, loss, opening.options.max_rounds, stages),
        opening.spent(s),
    )
    known = checked.after_of if promoted else checked.before_of
    losses = {c: (*s.losses.get(c, ()), r.loss) for c, r in results.items() if r.loss is not None}
    return replace(
        s,
        phase=Phase.OPEN,
        done=s.done + 1,
        missed=0,
        kept_back=0 if promoted else s.kept_back + 1,
        loss=loss if loss is not None else s.loss,
        losses={**s.losses, **losses},
        heldout=known,
        last_heldout={**s.last_heldout, **known},
        heldout_of=s.version if promoted else s.parent,
        results={},
    )


async def _enter(context: Context, s: Session, entry: AdapterVersion, checked: Check) -> bool:
    """Into the registry; False when it is kept without being promoted."""
    registry = context.registry
    if not checked.good:
        await registry.publish(s.adapter, entry, promote=False, why=checked.why)
        return False
    try:
        await registry.publish(s.adapter, entry, expected=s.parent, why=checked.why)
    except Conflict as e:  # somebody rolled back or loaded another version meanwhile
        await registry.publish(s.adapter, entry, promote=False, why=str(e))
        return False
    return (await registry.version(s.adapter, entry.version)).promoted
