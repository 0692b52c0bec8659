"""Dedicated replicas have loaded their own copy of the base: their session begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.rounds import Rounds
    from sim.world import World


def handle(world: World, rounds: Rounds) -> None:
    """Open the session, and let the dispatcher react to new states."""
    rounds.copies_loaded()
    world.decide()
