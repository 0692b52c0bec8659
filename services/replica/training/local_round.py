"""One client's part of a round: train from the parent version on this replica's own data."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from services.replica.training import update
from services.replica.training.context import DataSet, TrainingContext, read_tensors
from services.replica.training.gate import DeadlinePassed, ServingGate
from services.replica.training.heldout import HeldOut
from services.replica.training.history import History
from services.replica.training.model import Adapter
from services.replica.training.publisher import Publisher
from services.replica.training.saved_round import SavedRound
from services.replica.training.trainer import Plan, StepResult, Trainer
from shared.messages import TrainSample
from shared.rounds import BadJob, GradientNoise, RoundJob, RoundResult
from shared.stopwatch import Stopwatch

log = logging.getLogger(__name__)


class LocalRound:
    """Runs a ``RoundJob``. One object a job; ``check`` raises when the job must end."""

    def __init__(self, context: TrainingContext, job: RoundJob, check: Callable[[], None]) -> None:
        self._context, self._job, self._user_check = context, job, check
        self._settings = context.settings
        self._history = History()
        self._watch = Stopwatch()
        self._started = context.now()
        self._last_step_seconds = 1.0

    def run(self) -> RoundResult:
        """Raises ModelError, DataError, BadJob; Stopped when asked to stop."""
        job, context = self._job, self._context
        if not any(B > 0 for B in job.micro_batches):
            raise BadJob("micro_batches: at least one entry above 0 expected")
        with self._watch.stage("prepare"):
            data = context.data_set(job.adapter, job.max_tokens, job.heldout_fraction)
            if data is None or not data.train.examples:
                log.info("round %d of %s: no training data here", job.round, job.adapter)
                return self._result()
            adapter = context.adapter(job.lora, job.seed)
            parent = read_tensors(Path(job.parent_path), job.lora.rank)
            adapter.load(parent)
            self._gate = self._new_gate(adapter)
            trainer = self._trainer(adapter, data)
            self._saved = SavedRound(context.config.home, job, data.fingerprint)
            self._history = self._saved.restore(trainer)
            self._heldout = self._new_heldout(trainer, data, parent)
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

    def _new_gate(self, adapter: Adapter) -> ServingGate:
        return ServingGate(
            self._context.block,
            self._context.slots,
            self._check,
            threads=self._context.threads,
            yielding=self._settings.yielding,
            layers=adapter.model.config.num_hidden_layers,
            device=self._context.device,
        )

    def _new_heldout(self, trainer: Trainer, data: DataSet, parent: dict[str, Tensor]) -> HeldOut:
        job = self._job
        count = job.heldout_samples or self._settings.heldout_limit
        heldout = HeldOut(
            trainer,
            data.heldout.examples[:count],
            self._history,
            parent,
            self._watch,
            every=self._settings.evaluate_every,
            share=job.evaluate_share,
        )
        if self._history.heldout_before is None and job.heldout_before is not None:
            heldout.known(job.heldout_before)
        return heldout

    def _trainer(self, adapter: Adapter, data: DataSet) -> Trainer:
        job, settings = self._job, self._settings
        frozen = {"A", "B"} - set(job.train)
        plan = Plan(
            B=max(job.micro_batches),
            accumulation=job.accumulation,
            learning_rate=job.learning_rate,
            rate_batch=job.rate_batch,
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
        return Trainer(adapter, data.train.examples, plan, self._gate)

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
            turn = history.steps
            while history.steps < job.steps:
                trainer.B = job.micro_batches[turn % len(job.micro_batches)]
                turn += 1
                if trainer.B == 0:
                    with self._watch.stage("rest"):
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
        begun = time.monotonic()
        result = trainer.step()
        history.add(result)
        self._last_step_seconds = sum(result.micro_seconds) + result.wait_seconds
        self._watch.add("update", time.monotonic() - begun - self._last_step_seconds)
        last = history.steps >= job.steps
        ce, version = None, None
        if not last:  # after the last step the round's end does both
            if self._heldout.due():
                ce = self._heldout.now()
            if self._worth_publishing(ce):
                version = self._publish(adapter)
            if history.steps % settings.save_every == 0:
                self._save(trainer, finished=False)
        self._report(result, ce, version)

    def _publish(self, adapter: Adapter) -> str:
        with self._watch.stage("publish"):
            version, _ = self._publisher.publish(adapter, self._job.round, self._history.steps)
        return version

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
        """Held-out loss and publication at the round's end, past the deadline as well.

        Where the aggregate is judged at once, this loss would be of a version that serves for
        a moment only.
        """
        job = self._job
        if self._history.steps == 0:
            return None
        after = None
        try:
            after = None if job.judged else self._heldout.now()
        except DeadlinePassed:
            log.info("round %d of %s: no time for the held-out loss", job.round, job.adapter)
        if job.publish == "per_round" or self._worth_publishing(after):
            self._publish(adapter)
        self._save(trainer, finished=True)
        return after

    def _save(self, trainer: Trainer, *, finished: bool) -> None:
        with self._watch.stage("save"):
            self._saved.save(trainer, self._history, finished=finished)

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
        upload = self._history.steps > 0 and job.exchange == "redis" and bool(job.blob)
        with self._watch.stage("hand_over"):
            kept = update.keep(
                context.redis, context.config.home, job, parent, adapter.tensors(), upload=upload
            )
        first = self._gate.first_micro_step
        return msgspec.structs.replace(
            self._result(),
            heldout_after=after,
            noise=None if trainer.noise is None else GradientNoise(**asdict(trainer.noise)),
            first_step=context.redis_time(first) if first else 0.0,
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
            parts=self._watch.seconds,
        )
