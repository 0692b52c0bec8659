"""A client may have ended its round of local training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.rounds import Rounds
    from sim.world import World


def handle(world: World, argument: tuple[Rounds, str, int, int]) -> None:
    """How fast it went depended on what it served; it is looked at again if it is not done."""
    rounds, client, number, look = argument
    rounds.client_progress(client, number, look)
