"""A request reaches the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.job import Job
    from sim.world import World


def handle(world: World, job: Job) -> None:
    """Queue it and draw the next one, so that only one arrival is ever on the heap."""
    entered = world.enter(job)
    world.draw_arrival()
    if entered:
        world.decide()
