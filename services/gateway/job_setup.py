"""A job's set-up: its files checked, its data brought home, its adapter registered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from services.gateway.job_request import JobRequest, options, shards
from shared import data_homes, training_data
from shared.jobs import File, Job, path
from shared.tail import just_before

if TYPE_CHECKING:
    from services.gateway.service import Gateway

STORE_SECONDS = 60.0  # for the homes to take the data
JUDGED = 64  # validation examples that a home measures each version by, at most


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One of a job's files, checked."""

    file: str  # id
    name: str  # as its owner calls it
    raw: bytes
    chats: int

    def parts(self, many: int) -> list[bytes]:
        """For ``many`` homes; one with fewer examples goes whole to each."""
        if many == 1 or self.chats < many:
            return [self.raw] * many
        return list(data_homes.shards(self.raw, many))

    @property
    def suffix(self) -> str:
        return ".json" if self.raw.lstrip()[:1] == b"[" else ".jsonl"


class Unusable(Exception):
    """Why a job fails before it trains: OpenAI's ``code``, ``message`` and ``param``."""

    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


async def set_up(gateway: Gateway, job: Job, asked: JobRequest) -> None:
    """Check the files, bring them home, register the adapter: then the launcher acts."""
    try:
        training = await _source(gateway, job.training_file, "training_file")
        validation = None
        if job.validation_file:
            validation = await _source(gateway, job.validation_file, "validation_file")
        told = f"Files validated: {training.chats} examples"
        if validation is not None:
            told += f", {validation.chats} to validate with"
        await gateway.jobs.enter(job.id, "info", told)
        await _bring_home(gateway, job, asked, training, validation)
    except Unusable as e:
        await fail(gateway, job, e)
    except data_homes.NoHome as e:
        await fail(gateway, job, Unusable("no_replica", str(e), None))


async def fail(gateway: Gateway, job: Job, why: Unusable) -> None:
    error = {"code": why.code, "message": why.message, "param": why.param}
    if await gateway.jobs.update(job, status="failed", finished=gateway.clock(), error=error):
        await gateway.jobs.enter(job.id, "error", why.message)


async def drop_data(gateway: Gateway, job: Job) -> None:
    """Off its homes."""
    for home in job.homes:
        for file in filter(None, (job.training_file, job.validation_file)):
            await data_homes.send_delete(gateway.redis, home, job.adapter, file)


async def _source(gateway: Gateway, file_id: str, param: str) -> Source:
    """Raises Unusable naming file and line."""
    place = path(gateway.settings.data_dir, file_id)
    file = await gateway.jobs.get(File, file_id)
    name = file.filename if file else file_id
    try:
        raw, chats = await asyncio.to_thread(_read, place)
    except training_data.DataError as e:
        where = f"{name}:{e.line}" if e.line is not None else name
        raise Unusable(f"invalid_{param}", f"{where}: {e.reason}", param) from e
    return Source(file=file_id, name=name, raw=raw, chats=chats)


def _read(place: Path) -> tuple[bytes, int]:
    """Bytes of a file and its examples. Raises DataError."""
    try:
        return place.read_bytes(), len(training_data.load(place).chats)
    except OSError as e:
        raise training_data.DataError(place, None, e.strerror or str(e)) from e


async def _bring_home(
    gateway: Gateway, job: Job, asked: JobRequest, training: Source, validation: Source | None
) -> None:
    """Raises NoHome, Unusable."""
    live = gateway.catalogue.now.homes(job.model)
    homes = data_homes.choose(live, job.adapter, min(shards(asked), training.chats))
    chosen = options(asked, training.chats, len(homes))
    if validation is not None:
        share = -(-validation.chats // len(homes))
        chosen = {**chosen, "heldout_samples": min(share, JUDGED)}
    registry = gateway.adapters.registry
    await registry.register(
        job.adapter,
        base=job.model,
        rank=int(chosen["rank"]),
        lora_alpha=float(chosen["lora_alpha"]),
        tenant=job.tenant,
        source="job",
    )
    await registry.set_training(job.adapter, chosen)
    job = msgspec.structs.replace(job, homes=tuple(homes))
    # What judges goes first: no version is judged by anything else.
    if validation is not None:
        await _send(gateway, job, validation, "validation_file")
    await _send(gateway, job, training, "training_file")
    if not await gateway.jobs.update(job, status="queued", homes=job.homes):
        await drop_data(gateway, job)  # it was cancelled meanwhile
        return
    await gateway.jobs.enter(
        job.id,
        "info",
        f"Queued: the data is on {', '.join(homes)}; training starts when they are idle",
    )


async def _send(gateway: Gateway, job: Job, source: Source, param: str) -> None:
    """To all homes of the job. Raises Unusable when one does not take it."""
    redis = gateway.redis
    since = await just_before(redis)
    tickets = [
        await data_homes.send(
            redis,
            home,
            job.adapter,
            source.file,
            part,
            source.suffix,
            heldout=param == "validation_file",
        )
        for home, part in zip(job.homes, source.parts(len(job.homes)), strict=True)
    ]
    answers = await data_homes.answers(redis, tickets, since, STORE_SECONDS)
    bad = [a["why"] for a in answers.values() if a.get("ok") != "1"]
    if bad or len(answers) < len(tickets):
        await drop_data(gateway, job)
        why = "; ".join(bad) or "its home did not answer in time"
        raise Unusable("data_not_stored", f"{source.name}: {why}", param)
