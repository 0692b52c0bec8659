"""A client may have ended its round of local training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.federation import Federation
    from sim.world import World


def handle(world: World, argument: tuple[Federation, str, int]) -> None:
    """How fast it went depended on what it served; it is looked at again if it is not done."""
    federation, client, number = argument
    federation.client_progress(client, number)
