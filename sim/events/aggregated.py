"""The end of a federated round: all clients are done, or its deadline has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.rounds import Rounds
    from sim.world import World


def handle(world: World, argument: tuple[Rounds, int]) -> None:
    """Publish the aggregate and go on."""
    rounds, number = argument
    rounds.aggregate(number)
    world.decide()


def deadline(world: World, argument: tuple[Rounds, int]) -> None:
    """The round has taken as long as it may."""
    rounds, number = argument
    rounds.deadline(number)
    world.decide()
