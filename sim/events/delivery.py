"""A release reaches its replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.job import Job
    from sim.replica import Replica
    from sim.world import World


def handle(world: World, argument: tuple[Replica, Sequence[tuple[Job, int]]]) -> None:
    """Requests with the attempt that was released; the replica takes them into its queue."""
    replica, sent = argument
    world.deliver(replica, sent)
