"""Held-out losses of a local round: the parent's, the adapter's now and then, and at the end.

They are no training, so a round says what part of its time they may take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.replica.training.data import Example
from services.replica.training.history import History
from services.replica.training.trainer import Trainer
from shared.stopwatch import Stopwatch

STAGE = "evaluate"
FORWARD = 0.5  # of a micro-step's time a token: no gradients (an upper guess until measured)


class HeldOut:
    """Measures one trainer's adapter on ``examples``, which may be none.

    ``share``: seconds of evaluations in mid-round, as a part of the round's training so far;
    0 = as often as ``every`` says.
    """

    def __init__(
        self,
        trainer: Trainer,
        examples: Sequence[Example],
        history: History,
        parent: Mapping[str, Tensor],
        watch: Stopwatch,
        *,
        every: int,
        share: float,
    ) -> None:
        self._trainer, self._examples, self._history = trainer, examples, history
        self._parent, self._watch = parent, watch
        self._every, self._share = every, share
        self._last: float | None = None  # seconds of one evaluation

    def due(self) -> bool:
        """Whether a loss is wanted after this step and can be afforded."""
        history = self._history
        if not self._examples or history.steps % self._every:
            return False
        if self._share == 0:
            return True
        spent = self._watch.seconds.get(STAGE, 0.0)
        wanted = self._seconds() * (1 if history.heldout_before is not None else 2)
        return spent + wanted <= self._share * (history.train_seconds + history.wait_seconds)

    def now(self) -> float | None:
        """Of the adapter as it is, the parent's first if it is not known; None without examples.

        Raises what the gate raises.
        """
        if not self._examples:
            return None
        if self._history.heldout_before is None:
            self.known(self._of_parent())
        return self._evaluate()

    def known(self, loss: float) -> None:
        """The parent's loss: what an improvement is measured against."""
        self._history.heldout_before = self._history.best = loss

    # ------------------------------------------------------------ parts

    def _of_parent(self) -> float:
        adapter = self._trainer.adapter
        trained = adapter.flat.clone()
        adapter.load(self._parent)
        try:
            return self._evaluate()
        finally:
            with torch.no_grad():
                adapter.flat.copy_(trained)

    def _evaluate(self) -> float:
        before = self._watch.seconds.get(STAGE, 0.0)
        with self._watch.stage(STAGE):
            loss = self._trainer.evaluate(self._examples)
        self._last = self._watch.seconds[STAGE] - before
        return loss

    def _seconds(self) -> float:
        """Of the next evaluation: as long as the last one, or by its tokens."""
        if self._last is not None:
            return self._last
        history = self._history
        tokens = sum(len(e.ids) for e in self._examples)
        spent = history.train_seconds + history.wait_seconds
        return FORWARD * spent * tokens / max(1, history.tokens)
