"""Fine-tuning jobs: set up here, trained by launcher and coordinator, followed in ``events``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from services.gateway.access import Principal
from services.gateway.errors import ApiError, bad_value
from services.gateway.job_request import (
    JobRequest,
    hyperparameters,
    job_request,
    options,
    shards,
)
from services.gateway.routes import not_found
from shared import data_homes, names, sessions, training_data
from shared.jobs import ENDED, SEEN_SECONDS, File, Job, Jobs, new_id, path
from shared.redis_client import patiently
from shared.rounds import FIRST_VERSION
from shared.tail import follow

if TYPE_CHECKING:
    from services.gateway.service import Gateway

log = logging.getLogger(__name__)

STORE_SECONDS = 60.0  # for the homes to take the data
# Events that say something about an adapter's training, and how they read.
WARNINGS = frozenset(
    {"client_failed", "client_left", "round_failed", "send_failed", "check_failed"}
)


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
        shards(asked)
        job_id = new_id("ftjob")
        base = target.model.name
        suffix = _name_part(asked.suffix or "")
        tenant = who.tenant or "collm"
        parts = ["ft", _name_part(base), tenant, *([suffix] if suffix else []), job_id[6:18]]
        job = Job(
            id=job_id,
            tenant=who.tenant,
            model=base,
            adapter=":".join(parts)[:128],
            training_file=training.id,
            validation_file=validation.id if validation else "",
            suffix=asked.suffix or "",
            seed=asked.seed or 0,
            created=gateway.clock(),
            hyperparameters=_as_asked(asked),
            options=options(asked, 1, 1),
            metadata=asked.metadata or {},
            request=msgspec.json.encode(asked).decode(),
        )
        await self.jobs.add(job)
        await self.jobs.enter(job.id, "info", f"Created fine-tuning job: {job.id}")
        self._start(job, asked)
        return job

    def _start(self, job: Job, asked: JobRequest) -> None:
        task = asyncio.create_task(self._set_up(job, asked))
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

    async def _set_up(self, job: Job, asked: JobRequest) -> None:
        """Check the file, bring the data home, register the adapter: then the launcher acts."""
        place = path(self._gateway.settings.data_dir, job.training_file)
        file = await self.jobs.get(File, job.training_file)
        name = file.filename if file else job.training_file
        try:
            chats = await asyncio.to_thread(_check, place)
        except training_data.DataError as e:
            where = f"{name}:{e.line}" if e.line is not None else name
            await self._fail(job, "invalid_training_file", f"{where}: {e.reason}", "training_file")
            return
        await self.jobs.enter(job.id, "info", f"Files validated: {chats} examples")
        try:
            await self._bring_home(job, asked, place, chats, name)
        except data_homes.NoHome as e:
            await self._fail(job, "no_replica", str(e), None)

    async def _bring_home(
        self, job: Job, asked: JobRequest, place: Path, chats: int, name: str
    ) -> None:
        gateway, redis = self._gateway, self._gateway.redis
        live = sorted(gateway.catalogue.now.replicas.get(job.model, {}))
        many = min(shards(asked), max(1, len(live)))
        homes = data_homes.choose(live, job.adapter, many)
        chosen = options(asked, chats, len(homes))
        registry = gateway.adapters.registry
        await registry.register(
            job.adapter,
            base=job.model,
            rank=int(chosen.get("rank", 8)),
            lora_alpha=float(chosen.get("lora_alpha", 16.0)),
            tenant=job.tenant,
            source="job",
        )
        await registry.set_training(job.adapter, chosen)
        raw = await asyncio.to_thread(place.read_bytes)
        parts = list(data_homes.shards(raw, many)) if many > 1 else [raw]
        seconds, micros = await redis.time()
        since = f"{seconds * 1000 + micros // 1000 - 1}-0"
        suffix = ".json" if raw.lstrip()[:1] == b"[" else ".jsonl"
        tickets = [
            await data_homes.send(redis, home, job.adapter, job.training_file, part, suffix)
            for home, part in zip(homes, parts, strict=True)
        ]
        answers = await data_homes.answers(redis, tickets, since, STORE_SECONDS)
        bad = [a["why"] for a in answers.values() if a.get("ok") != "1"]
        if bad or len(answers) < len(tickets):
            await self._drop_data(job, homes)
            why = "; ".join(bad) or "its home did not answer in time"
            await self._fail(job, "data_not_stored", f"{name}: {why}", "training_file")
            return
        await self.jobs.update(job, status="queued", homes=tuple(homes), options=chosen)
        await self.jobs.enter(
            job.id,
            "info",
            f"Queued: the data is on {', '.join(homes)}; training starts when they are idle",
        )

    async def _fail(self, job: Job, code: str, message: str, param: str | None) -> None:
        error = {"code": code, "message": message, "param": param}
        now = self._gateway.clock()
        if await self.jobs.update(job, status="failed", finished=now, error=error):
            await self.jobs.enter(job.id, "error", message)

    async def _drop_data(self, job: Job, homes: list[str] | tuple[str, ...]) -> None:
        for home in homes:
            await data_homes.send_delete(self._gateway.redis, home, job.adapter, job.training_file)

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
        await self._drop_data(job, job.homes)

    async def pause(self, job: Job, paused: bool) -> None:
        """Between rounds; a queued job stays paused when its session opens."""
        _demand_live(job)
        if not await self.jobs.update(job, paused=paused):
            raise _has_ended(job)
        await self.jobs.enter(job.id, "info", "Paused" if paused else "Resumed")
        redis = self._gateway.redis
        for session in await sessions.live(redis):
            if session.adapter == job.adapter:
                await self._wish_pause(session.id, job, paused)

    async def _wish_pause(self, session: str, job: Job, paused: bool) -> None:
        redis = self._gateway.redis
        if paused:
            await sessions.wish(redis, session, "pause", f"job {job.id} is paused")
        else:
            await sessions.unwish(redis, session, "pause")

    # ------------------------------------------------------------ following

    async def run(self) -> None:
        """Enter what ``events`` says into the jobs it is about. Starts where it stopped."""
        redis = self._gateway.redis
        await patiently(self._take_up, "following jobs")
        raw = await patiently(lambda: redis.get(names.JOBS_CURSOR), "following jobs")
        since = raw.decode() if raw else "0-0"
        async for _, entry, fields in follow(redis, [names.EVENTS], since=since):
            if b"adapter" not in fields:
                continue
            plain = {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()}
            await patiently(lambda e=entry, p=plain: self._follow(e, p), "following jobs")  # type: ignore[misc]

    async def _take_up(self) -> None:
        """Jobs whose gateway went away before their data was at home."""
        for job in await self.jobs.all(Job):
            if job.status == "validating_files" and job.request:
                self._start(job, job_request(job.request.encode()))

    async def _follow(self, entry: str, fields: Mapping[str, str]) -> None:
        job = await self.jobs.of_adapter(fields["adapter"])
        if job is not None:
            await self._enter(job, entry, fields)
            await self._gateway.redis.set(names.JOBS_CURSOR, entry, ex=SEEN_SECONDS)

    async def _enter(self, job: Job, entry: str, fields: Mapping[str, str]) -> None:
        kind, why = fields.get("kind", ""), fields.get("why", "")
        if kind == "session_waits":
            await self.jobs.enter(job.id, "info", f"Waiting: {why}", source=entry)
        elif kind == "session_opened":
            session = fields.get("session", "")
            await self.jobs.update(job, status="running", session=session)
            told = await self.jobs.enter(job.id, "info", f"Training started: {why}", source=entry)
            if told and job.paused:
                await self._wish_pause(session, job, True)
        elif kind == "adapter_published":
            await self._published(job, entry, fields)
        elif kind == "session_ended":
            await self._session_ended(job, entry, why)
        elif kind in WARNINGS:
            message = f"{kind.replace('_', ' ')}: {fields.get('replica', '')} {why}".strip()
            await self.jobs.enter(job.id, "warn", message, source=entry)
        elif "round" in fields:
            data = {k: _number(v) for k, v in fields.items() if k not in ("kind", "adapter")}
            await self.jobs.enter(
                job.id, "info", kind.replace("_", " "), source=entry, kind="metrics", data=data
            )

    async def _published(self, job: Job, entry: str, fields: Mapping[str, str]) -> None:
        version = fields.get("version", "")
        if version == FIRST_VERSION:
            return  # B = 0: made before anything was learnt
        if await self.jobs.enter(
            job.id,
            "info",
            f"Checkpoint: version {version} of {job.adapter} can be used",
            source=entry,
            data={"version": version},
        ):
            await self.jobs.update(job, version=version, rounds=job.rounds + 1)

    async def _session_ended(self, job: Job, entry: str, why: str) -> None:
        now = self._gateway.clock()
        if not job.version and sessions.TOO_FEW in why:
            # Load took its replicas back before anything was learnt: it waits for them again.
            if await self.jobs.update(job, status="queued"):
                again = f"Waiting again: {why}; training starts when its replicas are idle"
                await self.jobs.enter(job.id, "warn", again, source=entry)
            return
        if job.version:
            level, message = "info", f"The job has completed: {why}"
            changed = await self.jobs.update(job, status="succeeded", finished=now)
        else:
            level, message = "error", f"Training ended without a version: {why}"
            error = {"code": "training_failed", "message": why, "param": None}
            changed = await self.jobs.update(job, status="failed", finished=now, error=error)
        if changed:
            await self.jobs.enter(job.id, level, message, source=entry)
            await self._drop_data(job, job.homes)

    async def close(self) -> None:
        for task in self._setups:
            task.cancel()


def _check(place: Path) -> int:
    """Examples in a training file. Raises DataError."""
    try:
        return len(training_data.load(place).chats)
    except OSError as e:
        raise training_data.DataError(place, None, e.strerror or str(e)) from e


def _demand_live(job: Job) -> None:
    if job.status in ENDED:
        raise _has_ended(job)


def _has_ended(job: Job) -> ApiError:
    return ApiError(400, f"job {job.id} has ended: {job.status}", param="id")


def _name_part(text: str) -> str:
    """Only what an adapter's name may hold."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in text)
    return kept.strip("-")[:40]


def _as_asked(asked: JobRequest) -> dict[str, Any]:
    found = hyperparameters(asked)
    return {
        "n_epochs": found.n_epochs,
        "batch_size": found.batch_size,
        "learning_rate_multiplier": found.learning_rate_multiplier,
    }


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
