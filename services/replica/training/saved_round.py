"""A local round's state between steps and between rounds: what a restart goes on from."""

from __future__ import annotations

import logging
from pathlib import Path

from services.replica.training import state
from services.replica.training.history import History
from services.replica.training.trainer import Trainer
from shared import adapter_files
from shared.rounds import RoundJob

log = logging.getLogger(__name__)


class SavedRound:
    """Of one job on one replica; ``data`` is the fingerprint of the data it trains on."""

    def __init__(self, home: Path, job: RoundJob, data: str) -> None:
        self._job, self._data = job, data
        name = adapter_files.check_name(job.adapter)
        self._path = home / "state" / f"{name}.safetensors"

    def restore(self, trainer: Trainer) -> History:
        """Optimiser and place in the data from the session's last saved state; the weights
        too, when it is this very round that was interrupted: its history is returned then."""
        job, fresh = self._job, History()
        found = state.load(self._path)
        if found is None:
            return fresh
        card, tensors = found
        if (card.session, card.lora, card.data) != (job.session, trainer.adapter.spec, self._data):
            return fresh
        same = card.round == job.round and card.parent == job.parent
        if not same and card.round >= job.round:
            return fresh  # another history: begin with a fresh optimiser
        trainer.restore(tensors, card.numbers, weights=same)
        if not same:
            return fresh
        history = History.of(card.history)
        log.info("round %d of %s goes on after step %d", job.round, job.adapter, history.steps)
        return history

    def save(self, trainer: Trainer, history: History, *, finished: bool) -> None:
        tensors, numbers = trainer.state()
        card = state.StateCard(
            session=self._job.session,
            round=self._job.round,
            parent=self._job.parent,
            data=self._data,
            lora=trainer.adapter.spec,
            numbers=numbers,
            finished=finished,
            history=history.plain(),
        )
        state.save(self._path, card, tensors)
