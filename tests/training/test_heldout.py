"""Held-out losses of a round: when they are due, and that the parent's is of the parent."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from services.replica.training.data import Example
from services.replica.training.heldout import STAGE, HeldOut
from services.replica.training.history import History
from shared.stopwatch import Stopwatch


class _Adapter:
    def __init__(self) -> None:
        self.flat = torch.tensor([3.0])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.flat.copy_(tensors["flat"])


class _Trainer:
    """Its loss is its only weight."""

    def __init__(self) -> None:
        self.adapter, self.evaluated = _Adapter(), list[float]()

    def evaluate(self, examples: object) -> float:
        self.evaluated.append(float(self.adapter.flat))
        return self.evaluated[-1]


EXAMPLES = [Example((1, 2, 3, 4), (False, True, True, True))] * 5  # 20 tokens


def heldout(
    history: History, *, share: float, every: int = 5, examples: list[Example] = EXAMPLES
) -> tuple[HeldOut, _Trainer, Stopwatch]:
    trainer, watch = _Trainer(), Stopwatch()
    made = HeldOut(
        trainer,  # type: ignore[arg-type]
        examples,
        history,
        {"flat": torch.tensor([7.0])},
        watch,
        every=every,
        share=share,
    )
    return made, trainer, watch


def history(steps: int, seconds: float = 1.0) -> History:
    """Each step: 20 tokens in ``seconds``."""
    return History(steps=steps, tokens=20 * steps, train_seconds=seconds * steps)


def test_the_parents_loss_is_measured_on_its_weights_and_the_adapter_goes_on_as_it_was() -> None:
    books = history(5)
    measured, trainer, _ = heldout(books, share=0)
    assert measured.now() == 3.0
    assert trainer.evaluated == [7.0, 3.0]
    assert (books.heldout_before, books.best) == (7.0, 7.0)
    assert float(trainer.adapter.flat) == 3.0
    measured.now()
    assert trainer.evaluated == [7.0, 3.0, 3.0]  # once


def test_a_known_loss_of_the_parent_is_not_measured_again() -> None:
    books = history(5)
    measured, trainer, _ = heldout(books, share=0)
    measured.known(6.5)
    measured.now()
    assert trainer.evaluated == [3.0]
    assert books.heldout_before == 6.5


def test_without_a_bound_every_fifth_step_is_measured() -> None:
    books = history(0)
    measured, _, _ = heldout(books, share=0)
    due = []
    for books.steps in range(1, 12):
        due.append(measured.due())
    assert [i + 1 for i, d in enumerate(due) if d] == [5, 10]


@pytest.mark.parametrize(("share", "first"), [(0.05, 10), (0.025, 20), (0.5, 5)])
def test_a_bound_puts_the_first_loss_off_until_it_can_be_afforded(share: float, first: int) -> None:
    """By its tokens an evaluation takes half of a step here: 0.5 s of n s."""
    books = history(0)
    measured, _, _ = heldout(books, share=share)
    measured.known(7.0)
    for n in range(1, 30):
        books.steps, books.tokens, books.train_seconds = n, 20 * n, float(n)
        if measured.due():
            break
    assert n == first


def test_what_was_spent_counts_against_the_bound() -> None:
    books = history(10)
    measured, _, watch = heldout(books, share=0.1)
    measured.known(7.0)
    assert measured.due()
    watch.add(STAGE, 0.6)  # of the 1.0 s that ten steps allow; another takes 0.5
    assert not measured.due()


def test_nothing_held_out_is_never_due() -> None:
    measured, trainer, _ = heldout(history(5), share=0, examples=[])
    assert not measured.due()
    assert measured.now() is None
    assert trainer.evaluated == []
