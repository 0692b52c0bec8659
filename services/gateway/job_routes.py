"""/v1/fine_tuning/jobs in OpenAI's shape; every required field is there even when null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from services.gateway.access import Principal
from services.gateway.fine_tuning import FineTuning
from services.gateway.job_request import job_request
from services.gateway.routes import caller, exchange_of, json, page
from shared.adapters import AdapterVersion
from shared.jobs import Job, JobEvent

if TYPE_CHECKING:
    from services.gateway.service import Gateway


def estimated_finish(job: Job, now: float) -> int | None:
    """By the rounds that may be left and the mean of those done; None while nothing is known.

    A job that learns no more ends sooner.
    """
    if job.status != "running" or job.paused or job.rounds_done == 0:
        return None
    left = job.rounds_left * job.round_seconds / job.rounds_done
    return int(max(now, job.heard + left))


def shown(job: Job, now: float) -> dict[str, Any]:
    """The job object at Redis time ``now``. ``fine_tuned_model`` is set as soon as a version can
    be asked; ``trained_tokens`` counts the rounds that are done."""
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created),
        "finished_at": int(job.finished) if job.finished else None,
        "model": job.model,
        "fine_tuned_model": job.adapter if job.version else None,
        "organization_id": job.tenant or "collm",
        "result_files": [],
        "status": job.status,
        "trained_tokens": job.trained_tokens or None,
        "training_file": job.training_file,
        "validation_file": job.validation_file or None,
        "seed": job.seed,
        "hyperparameters": job.hyperparameters,
        "method": {
            "type": "supervised",
            "supervised": {"hyperparameters": job.hyperparameters},
        },
        "metadata": job.metadata or None,
        "user_provided_suffix": job.suffix or None,
        "integrations": [],
        "error": job.error or None,
        "estimated_finish": estimated_finish(job, now),
        "paused": job.paused,
    }


def shown_event(event: JobEvent) -> dict[str, Any]:
    return {
        "id": f"ftevent-{event.id}",
        "object": "fine_tuning.job.event",
        "created_at": int(event.created),
        "level": event.level,
        "message": event.message,
        "type": event.type,
        "data": event.data,
    }


def shown_checkpoint(job: Job, entry: AdapterVersion) -> dict[str, Any]:
    """A round's version; it is asked by the fine-tuned model's name while it is current."""
    return {
        "id": f"ftckpt-{entry.version}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(entry.created),
        "fine_tuned_model_checkpoint": job.adapter,
        "fine_tuning_job_id": job.id,
        "step_number": entry.round,
        "metrics": {
            "step": entry.round,
            "train_loss": entry.loss,
            "valid_loss": entry.heldout_ce,
        },
        "version": entry.version,
        "quality": entry.quality,
    }


async def _obey(tuning: FineTuning, job_id: str, verb: str, who: Principal) -> Job:
    """Raises ApiError 400, 404."""
    job = await tuning.find(job_id, who)
    if verb == "cancel":
        await tuning.cancel(job)
    elif verb in ("pause", "resume"):
        await tuning.pause(job, verb == "pause")
    else:
        raise HTTPException(404)
    return await tuning.find(job_id, who)


def add(app: FastAPI, gateway: Gateway) -> None:
    tuning = gateway.fine_tuning
    prefix = "/v1/fine_tuning/jobs"

    @app.post(prefix)
    async def create(request: Request) -> Response:
        settings = gateway.settings
        body = await exchange_of(request).body(settings.max_body_bytes, settings.body_timeout)
        job = await tuning.create(job_request(body), caller(request))
        return json(shown(job, gateway.clock()))

    @app.get(prefix)
    async def listing(request: Request) -> Response:
        found = await gateway.jobs.all(Job, caller(request).sees)
        for name, value in request.query_params.items():
            if name.startswith("metadata[") and name.endswith("]"):
                found = [j for j in found if j.metadata.get(name[9:-1]) == value]
        now = gateway.clock()
        return page([shown(j, now) for j in found], request)

    @app.get(prefix + "/{job_id}")
    async def one(request: Request, job_id: str) -> Response:
        return json(shown(await tuning.find(job_id, caller(request)), gateway.clock()))

    @app.post(prefix + "/{job_id}/{verb}")
    async def command(request: Request, job_id: str, verb: str) -> Response:
        """cancel, pause, resume."""
        job = await _obey(tuning, job_id, verb, caller(request))
        return json(shown(job, gateway.clock()))

    @app.get(prefix + "/{job_id}/events")
    async def events(request: Request, job_id: str) -> Response:
        job = await tuning.find(job_id, caller(request))
        return page([shown_event(e) for e in await gateway.jobs.events(job.id)], request)

    @app.get(prefix + "/{job_id}/checkpoints")
    async def checkpoints(request: Request, job_id: str) -> Response:
        job = await tuning.find(job_id, caller(request))
        versions = await gateway.adapters.registry.versions(job.adapter)
        found = [v for v in reversed(versions) if v.round > 0]
        return page([shown_checkpoint(job, v) for v in found], request)
