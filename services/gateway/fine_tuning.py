"""Fine-tuning jobs: what their owners ask. ``job_setup`` brings the data home, launcher and
coordinator train, ``job_follow`` enters what ``events`` says."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from services.gateway import job_setup
from services.gateway.access import Principal
from services.gateway.errors import ApiError, bad_value
from services.gateway.job_follow import Follower, wish_pause
from services.gateway.job_request import (
    JobRequest,
    hyperparameters,
    job_request,
    options,
    shards,
)
from services.gateway.routes import not_found
from shared import sessions
from shared.jobs import ENDED, File, Job, Jobs, new_id
from shared.redis_client import patiently

if TYPE_CHECKING:
    from services.gateway.service import Gateway

log = logging.getLogger(__name__)


class FineTuning:
    """All jobs of this system; any gateway may carry any of them on."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.jobs: Jobs = gateway.jobs
        self._setups: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ create

    async def create(self, asked: JobRequest, who: Principal) -> Job:
        """Raises ApiError 400, 404."""
        gateway = self._gateway
        target = gateway.catalogue.find(asked.model, who.sees)
        if target is None:
            raise ApiError(404, f"no model {asked.model!r}", param="model", code="model_not_found")
        if target.adapter is not None:
            raise bad_value("model", "name a base model: a job makes an adapter of its own")
        training = await self._file(asked.training_file, "training_file", who)
        validation = None
        if asked.validation_file is not None:
            validation = await self._file(asked.validation_file, "validation_file", who)
            if validation.id == training.id:
                raise bad_value("validation_file", "validation_file is the training file")
        shards(asked)
        options(asked, 1, 1)  # bad metadata is told now, not when the job is set up
        job_id = new_id("ftjob")
        base = target.model.name
        suffix = _name_part(asked.suffix or "")
        tenant = (who.tenant or "collm")[:32]
        parts = ["ft", _name_part(base), tenant, *([suffix] if suffix else []), job_id[6:18]]
        job = Job(
            id=job_id,
            tenant=who.tenant,
            model=base,
            adapter=":".join(parts),
            training_file=training.id,
            validation_file=validation.id if validation else "",
            suffix=asked.suffix or "",
            seed=asked.seed or 0,
            created=gateway.clock(),
            hyperparameters=_as_asked(asked),
            metadata=asked.metadata or {},
            request=msgspec.json.encode(asked).decode(),
        )
        await self.jobs.add(job)
        await self.jobs.enter(job.id, "info", f"Created fine-tuning job: {job.id}")
        self._start(job, asked)
        return job

    def _start(self, job: Job, asked: JobRequest) -> None:
        task = asyncio.create_task(job_setup.set_up(self._gateway, job, asked))
        self._setups.add(task)
        task.add_done_callback(self._set_up_done)

    async def _file(self, file_id: str, param: str, who: Principal) -> File:
        try:
            return await self._gateway.files.find(file_id, who)
        except ApiError:
            raise ApiError(400, f"{param}: no such file: {file_id[:64]}", param=param) from None

    def _set_up_done(self, task: asyncio.Task[None]) -> None:
        self._setups.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a fine-tuning job was not set up", exc_info=fault)

    # ------------------------------------------------------------ commands

    async def find(self, job_id: str, who: Principal) -> Job:
        """Raises ApiError 404, also for another tenant's."""
        good = job_id.startswith("ftjob-") and job_id[6:].isalnum()
        job = await self.jobs.get(Job, job_id) if good else None
        if job is None or (who.sees is not None and job.tenant != who.sees):
            raise not_found("fine-tuning job", job_id[:64])
        return job

    async def cancel(self, job: Job) -> None:
        """Stop its session; published versions stay servable. Raises ApiError 400 when ended."""
        _demand_live(job)
        if not await self.jobs.update(job, status="cancelled", finished=self._gateway.clock()):
            raise _has_ended(job)
        await self.jobs.enter(job.id, "info", "The job has been cancelled")
        redis = self._gateway.redis
        for session in await sessions.live(redis):
            if session.adapter == job.adapter:
                await sessions.wish(redis, session.id, "stop", f"job {job.id} was cancelled")
        await job_setup.drop_data(self._gateway, job)

    async def pause(self, job: Job, paused: bool) -> None:
        """Between rounds; a queued job stays paused when its session opens."""
        _demand_live(job)
        heard = job.heard if paused else self._gateway.clock()  # the rest begins now
        if not await self.jobs.update(job, paused=paused, heard=heard):
            raise _has_ended(job)
        await self.jobs.enter(job.id, "info", "Paused" if paused else "Resumed")
        redis = self._gateway.redis
        for session in await sessions.live(redis):
            if session.adapter == job.adapter:
                await wish_pause(self._gateway, session.id, job, paused)

    async def run(self) -> None:
        """Take up what another gateway left, then follow all jobs."""
        await patiently(self._take_up, "following jobs")
        await Follower(self._gateway).run()

    async def _take_up(self) -> None:
        """Jobs whose gateway went away before their data was at home."""
        for job in await self.jobs.all(Job):
            if job.status == "validating_files" and job.request:
                self._start(job, job_request(job.request.encode()))

    async def close(self) -> None:
        for task in self._setups:
            task.cancel()


def _demand_live(job: Job) -> None:
    if job.status in ENDED:
        raise _has_ended(job)


def _has_ended(job: Job) -> ApiError:
    return ApiError(400, f"job {job.id} has ended: {job.status}", param="id")


def _name_part(text: str) -> str:
    """Only what an adapter's name may hold."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in text)
    return kept.strip("-")[:38]


def _as_asked(asked: JobRequest) -> dict[str, Any]:
    found = hyperparameters(asked)
    return {
        "n_epochs": found.n_epochs,
        "batch_size": found.batch_size,
        "learning_rate_multiplier": found.learning_rate_multiplier,
    }
