"""What a client is asked to do in a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.coordinator.settings import CoordinatorSettings, TrainingOptions
from services.coordinator.telemetry import Telemetry
from services.coordinator.training import Training
from shared.messages import StepSample
from shared.rounds import RoundJob
from shared.sessions import Session


def asked(done: int = 0, B: int = 4, seen: bool = False, **options: Any) -> RoundJob:
    telemetry = Telemetry()
    if seen:
        step = StepSample(
            replica="r", model="m", incarnation="i", seq=1, time=1.0, seconds=0.1, b=1
        )
        telemetry.step(step)
    context: Any = SimpleNamespace(settings=CoordinatorSettings(), telemetry=telemetry)
    session = Session(
        id="s", adapter="a", base="m", clients=("r",), server="r", done=done, B={"r": B}
    )
    chosen = TrainingOptions(local_steps=50, B0=4, **options)
    return Training(context, session, chosen, chosen.lora, "nowhere").job("r")


def test_a_first_round_sees_each_batch_twice_and_is_over() -> None:
    job = asked()
    assert job.micro_batches == (4, 0, 8)
    assert job.steps == 6
    assert asked(seen=True).micro_batches == (4, 8)
    assert asked(seen=True).steps == 4


def test_later_rounds_have_all_their_steps_with_the_batch_that_was_chosen() -> None:
    job = asked(done=1, B=7)
    assert job.micro_batches == (7,)
    assert job.steps == 50


def test_a_chosen_batch_goes_further_than_b0_and_a_fixed_one_by_its_own_rate() -> None:
    assert asked(done=1, B=7).rate_batch == asked().rate_batch == 4
    fixed = asked(B=7, micro_batch=7)
    assert fixed.rate_batch == 0
    assert (fixed.micro_batches, fixed.steps) == ((7,), 50)
