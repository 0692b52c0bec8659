"""The policy is asked although nothing happened: it wanted to be, or a turn was put off."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.world import World


def handle(world: World, armed: float) -> None:
    """Ignore wakes that a later decision has overtaken."""
    if world.armed == armed:
        world.armed = None
        world.decide_now()
