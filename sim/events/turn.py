"""A replica comes to the end of its span of iterations (or wakes up for new work)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.replica import Replica
    from sim.world import World


def handle(world: World, argument: tuple[Replica, int]) -> None:
    """Deliver, plan the next span, tell the policy who finished."""
    replica, generation = argument
    if generation != replica.generation:
        return  # the span was cut: another turn came before this one
    now = world.kernel.now
    span = replica.span
    if span is not None:
        world.recorder.busy.spread(replica.row, span.start, now)
    finished = replica.complete(now)
    if span is not None and world.observers:
        world.stepped(replica, span)
    end = replica.plan(now)
    if end is not None:
        world.schedule_turn(replica, end)
    if finished:
        for job in finished:
            world.finish(job, replica)
        world.decide()
