"""A tick of the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.federation import Federation
    from sim.world import World


def handle(world: World, federation: Federation) -> None:
    """Look at the cluster, decide, and let the dispatcher react to new states."""
    federation.tick()
    world.decide()
