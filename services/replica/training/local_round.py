"""One client's part of a round: train from the parent version on this replica's own data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from services.replica.training import state, update
from services.replica.training.context import DataSet, TrainingContext, read_tensors
from services.replica.training.data import Example
from services.replica.training.gate import DeadlinePassed, ServingGate
from services.replica.training.history import History
from services.replica.training.model import Adapter
from services.replica.training.publisher import Publisher
from services.replica.training.trainer import Plan, StepResult, Trainer
from shared import adapter_files
from shared.messages import TrainSample
from shared.rounds import BadJob, RoundJob, RoundResult

log = logging.getLogger(__name__)


class LocalRound:
    """Runs a ``RoundJob``. One object a job; ``check`` raises when the job must end."""

    def __init__(self, context: TrainingContext, job: RoundJob, check: Callable[[], None]) -> None:
        self._context, self._job, self._user_check = context, job, check
        self._settings = context.settings
        self._history = History()
        self._started = context.now()
        self._heldout: Sequence[Example] = ()
        self._last_step_seconds = 1.0

    def run(self) -> RoundResult:
        """Raises ModelError, DataError, BadJob; Stopped when asked to stop."""
        job, context = self._job, self._context
        if not any(B > 0 for B in job.micro_batches):
            raise BadJob("micro_batches: at least one entry above 0 expected")
        self._data = context.data_set(job.adapter, job.max_tokens, job.heldout_fraction)
        if self._data is None or not self._data.train.examples:
            log.info("round %d of %s: no training data here", job.round, job.adapter)
            return self._result()
        adapter = context.adapter(job.lora, job.seed)
        parent = read_tensors(Path(job.parent_path), job.lora.rank)
        adapter.load(parent)
        self._heldout = self._data.heldout.examples[: self._settings.heldout_limit]
        self._gate = ServingGate(
            context.block,
            context.slots,
            self._check,
            threads=self._settings.threads,
            yielding=self._settings.yielding,
            layers=adapter.model.config.num_hidden_layers,
        )
        trainer = self._trainer(adapter, self._data)
        context.block.training = 1
        try:
            self._train(trainer, adapter)
            after = self._finish(trainer, adapter)
        finally:
            context.block.training = 0
            self._gate.release()
            trainer.close()
        return self._hand_over(adapter, parent, after, trainer)

    # ------------------------------------------------------------ parts

    def _check(self) -> None:
        self._user_check()
        if self._job.deadline and self._context.now() >= self._job.deadline:
            raise DeadlinePassed

    def _trainer(self, adapter: Adapter, data: DataSet) -> Trainer:
        job, settings = self._job, self._settings
        frozen = {"A", "B"} - set(job.train)
        plan = Plan(
            B=max(job.micro_batches),
            accumulation=job.accumulation,
            learning_rate=job.learning_rate,
            schedule=settings.schedule,
            total_steps=job.steps * max(1, job.max_rounds),
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
            proximal=job.prox_mu,
            freeze=frozen.pop() if len(frozen) == 1 else "none",
            gradient_checkpointing=settings.gradient_checkpointing,
            seed=job.seed,
        )
        torch.manual_seed(job.seed + job.round)
        trainer = Trainer(adapter, data.train.examples, plan, self._gate)
        self._restore(trainer, data)
        return trainer

    def _restore(self, trainer: Trainer, data: DataSet) -> None:
        """Optimiser and place in the data from the session's last saved state; the weights
        too, when it is this very round that was interrupted."""
        job = self._job
        found = state.load(self._state_path())
        if found is None:
            return
        card, tensors = found
        spec = trainer.adapter.spec
        if card.session != job.session or card.lora != spec or card.data != data.fingerprint:
            return
        same = card.round == job.round and card.parent == job.parent
        if same:
            self._history = History.of(card.history)
            log.info(
                "round %d of %s goes on after step %d", job.round, job.adapter, self._history.steps
            )
        elif card.round >= job.round:
            return  # another history: begin with a fresh optimiser
        trainer.restore(tensors, card.numbers, weights=same)

    def _train(self, trainer: Trainer, adapter: Adapter) -> None:
        job, history = self._job, self._history
        self._publisher = Publisher(
            data_dir=Path(self._context.config.data_dir),
            replica=self._context.config.replica,
            name=job.adapter,
            base=self._context.config.folder,
            shadow=self._context.shadow(),
            keep=self._settings.keep_versions,
        )
        try:
            if history.heldout_before is None and self._heldout:
                history.heldout_before = history.best = trainer.evaluate(self._heldout)
            turn = history.steps
            while history.steps < job.steps:
                trainer.B = job.micro_batches[turn % len(job.micro_batches)]
                turn += 1
                if trainer.B == 0:
                    self._gate.rest(self._last_step_seconds)
                    continue
                self._one_step(trainer, adapter)
        except DeadlinePassed:
            log.info(
                "round %d of %s: deadline after %d of %d steps",
                job.round,
                job.adapter,
                history.steps,
                job.steps,
            )

    def _one_step(self, trainer: Trainer, adapter: Adapter) -> None:
        job, settings, history = self._job, self._settings, self._history
        result = trainer.step()
        history.add(result)
        self._last_step_seconds = sum(result.micro_seconds) + result.wait_seconds
        last = history.steps >= job.steps
        ce, version = None, None
        if not last:  # after the last step the round's end does both
            if history.steps % settings.evaluate_every == 0:
                ce = self._evaluate(trainer)
            if self._worth_publishing(ce):
                version, _ = self._publisher.publish(adapter, job.round, history.steps)
            if history.steps % settings.save_every == 0:
                self._save(trainer, finished=False)
        self._report(result, ce, version)

    def _evaluate(self, trainer: Trainer) -> float | None:
        return trainer.evaluate(self._heldout) if self._heldout else None

    def _worth_publishing(self, ce: float | None) -> bool:
        """By the job's rule; without held-out data nothing can improve before the round's end."""
        if self._job.publish == "every_step":
            return True
        if self._job.publish != "on_improvement" or ce is None:
            return False
        best = self._history.best
        if best is not None and ce >= best:
            return False
        self._history.best = ce
        return True

    def _finish(self, trainer: Trainer, adapter: Adapter) -> float | None:
        """Held-out loss and publication at the round's end, past the deadline as well."""
        job, history = self._job, self._history
        if history.steps == 0:
            return None
        after = None
        try:
            after = self._evaluate(trainer)
        except DeadlinePassed:
            log.info("round %d of %s: no time for the held-out loss", job.round, job.adapter)
        if job.publish == "per_round" or self._worth_publishing(after):
            self._publisher.publish(adapter, job.round, history.steps)
        self._save(trainer, finished=True)
        return after

    def _save(self, trainer: Trainer, *, finished: bool) -> None:
        tensors, numbers = trainer.state()
        assert self._data is not None
        card = state.StateCard(
            session=self._job.session,
            round=self._job.round,
            parent=self._job.parent,
            data=self._data.fingerprint,
            lora=trainer.adapter.spec,
            numbers=numbers,
            finished=finished,
            history=self._history.plain(),
        )
        state.save(self._state_path(), card, tensors)

    def _state_path(self) -> Path:
        name = adapter_files.check_name(self._job.adapter)
        return self._context.config.home / "state" / f"{name}.safetensors"

    def _report(self, result: StepResult, ce: float | None, version: str | None) -> None:
        self._context.metric(
            "train",
            TrainSample(
                replica=self._context.config.replica,
                adapter=self._job.adapter,
                time=self._context.now(),
                round=self._job.round,
                step=self._history.steps,
                B=result.B,
                b=round(result.beside),
                micro_seconds=sum(result.micro_seconds) / len(result.micro_seconds),
                wait_seconds=result.wait_seconds,
                tokens=result.tokens,
                loss=result.loss if math.isfinite(result.loss) else None,
                loss_reduction=result.loss_reduction,
                noise_scale=result.noise_scale,
                heldout_ce=ce,
                version=version,
            ),
        )

    # ------------------------------------------------------------ handing over

    def _hand_over(
        self,
        adapter: Adapter,
        parent: dict[str, Tensor],
        after: float | None,
        trainer: Trainer,
    ) -> RoundResult:
        """Keep the update on disk, upload it where the job says so, report."""
        job, context = self._job, self._context
        kept = update.keep(
            context.redis,
            context.config.home,
            job,
            parent,
            adapter.tensors(),
            upload=self._history.steps > 0 and job.exchange == "redis" and bool(job.blob),
        )
        first = self._gate.first_micro_step
        return msgspec.structs.replace(
            self._result(),
            heldout_after=after,
            noise_scale=trainer.noise.scale if trainer.noise is not None else None,
            first_step=context.redis_time(first) if first else 0.0,
            norm=kept.norm,
            blob=kept.blob,
            exchange_seconds=kept.seconds,
            exchange_bytes=kept.bytes,
            published=tuple(self._publisher.published),
        )

    def _result(self) -> RoundResult:
        """The numbers that do not need an adapter."""
        job, history = self._job, self._history
        return RoundResult(
            session=job.session,
            round=job.round,
            client=job.client,
            base=job.base,
            parent=job.parent,
            lora=job.lora,
            examples=history.examples,
            steps=history.steps,
            micro_steps=history.micro_steps,
            tokens=history.tokens,
            first_loss=history.first_loss,
            loss=history.loss,
            last_loss=history.last_loss,
            heldout_before=history.heldout_before,
            loss_reduction=history.loss_reduction,
            started=self._started,
            seconds=self._context.now() - self._started,
            train_seconds=history.train_seconds,
            wait_seconds=history.wait_seconds,
        )
