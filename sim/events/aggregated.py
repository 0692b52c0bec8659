"""The end of a federated round: all clients are done, or its deadline has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.federation import Federation
    from sim.world import World


def handle(world: World, argument: tuple[Federation, int]) -> None:
    """Publish the aggregate and go on."""
    federation, number = argument
    federation.aggregate(number)
    world.decide()


def deadline(world: World, argument: tuple[Federation, int]) -> None:
    """The round has taken as long as it may."""
    federation, number = argument
    federation.deadline(number)
    world.decide()
