"""What ``events`` says about an adapter's training, entered into the job that wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from services.gateway import job_setup
from shared import names, sessions
from shared.jobs import SEEN_SECONDS, Job
from shared.redis_client import patiently
from shared.rounds import FIRST_VERSION
from shared.tail import follow

if TYPE_CHECKING:
    from services.gateway.service import Gateway

# Events that warn, and read like their names.
WARNINGS = frozenset(
    {"client_failed", "client_left", "round_failed", "send_failed", "check_failed"}
)


class Follower:
    """Any gateway may carry any job on; each event is entered once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._jobs = gateway, gateway.jobs

    async def run(self) -> None:
        """Enter what ``events`` says into the jobs it is about. Starts where it stopped."""
        redis = self._gateway.redis
        raw = await patiently(lambda: redis.get(names.JOBS_CURSOR), "following jobs")
        since = raw.decode() if raw else "0-0"
        async for _, entry, fields in follow(redis, [names.EVENTS], since=since):
            if b"adapter" not in fields:
                continue
            plain = {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()}
            await patiently(lambda e=entry, p=plain: self._follow(e, p), "following jobs")  # type: ignore[misc]

    async def _follow(self, entry: str, fields: Mapping[str, str]) -> None:
        job = await self._jobs.of_adapter(fields["adapter"])
        if job is not None:
            await self._enter(job, entry, fields)
            await self._gateway.redis.set(names.JOBS_CURSOR, entry, ex=SEEN_SECONDS)

    async def _enter(self, job: Job, entry: str, fields: Mapping[str, str]) -> None:
        kind, why = fields.get("kind", ""), fields.get("why", "")
        if kind == "session_waits":
            await self._jobs.enter(job.id, "info", f"Waiting: {why}", source=entry)
        elif kind == "session_opened":
            session = fields.get("session", "")
            await self._jobs.update(job, status="running", session=session)
            told = await self._jobs.enter(job.id, "info", f"Training started: {why}", source=entry)
            if told and job.paused:
                await wish_pause(self._gateway, session, job, True)
        elif kind == "adapter_published":
            await self._published(job, entry, fields)
        elif kind == "round_done":
            await self._round_done(job, entry, fields)
        elif kind == "session_ended":
            await self._session_ended(job, entry, why)
        elif kind in WARNINGS:
            message = f"{kind.replace('_', ' ')}: {fields.get('replica', '')} {why}".strip()
            await self._jobs.enter(job.id, "warn", message, source=entry)
        elif "round" in fields:
            await self._jobs.enter(
                job.id,
                "info",
                kind.replace("_", " "),
                source=entry,
                kind="metrics",
                data=_numbers(fields),
            )

    async def _published(self, job: Job, entry: str, fields: Mapping[str, str]) -> None:
        version = fields.get("version", "")
        if version == FIRST_VERSION:
            return  # B = 0: made before anything was learnt
        if await self._jobs.enter(
            job.id,
            "info",
            f"Checkpoint: version {version} of {job.adapter} can be used",
            source=entry,
            data={"version": version},
        ):
            await self._jobs.update(job, version=version)

    async def _round_done(self, job: Job, entry: str, fields: Mapping[str, str]) -> None:
        """Losses as OpenAI words them; the round's tokens and seconds into the job's books.

        A coordinator that was restarted may tell a round again: it counts once.
        """
        found = _numbers(fields)
        losses = {"train_loss": found.get("loss"), "valid_loss": found.get("heldout")}
        good = {k: v for k, v in losses.items() if isinstance(v, float)}
        words = {"train_loss": "training loss", "valid_loss": "validation loss"}
        step, steps = fields.get("done", "?"), fields.get("of", "?")
        said = ", ".join(f"{words[k]}={v:.4f}" for k, v in good.items())
        tokens, seconds = found.get("tokens", 0.0), found.get("seconds", 0.0)
        told = await self._jobs.enter(
            job.id,
            "info",
            f"Step {step}/{steps}: {said or 'nothing measured'}",
            source=f"{fields.get('session', '')}/{fields.get('round', entry)}",
            kind="metrics",
            data={**found, **good, "step": found.get("done"), "total_steps": found.get("of")},
            add={
                "trained_tokens": int(tokens) if isinstance(tokens, float) else 0,
                "round_seconds": seconds if isinstance(seconds, float) else 0.0,
                "rounds_done": 1,
            },
        )
        if told and step.isdigit() and steps.isdigit():
            left = max(0, int(steps) - int(step))
            at = int(entry.split("-")[0]) / 1e3
            await self._jobs.update(job, rounds_left=left, heard=at)

    async def _session_ended(self, job: Job, entry: str, why: str) -> None:
        now = self._gateway.clock()
        if not job.version and sessions.TOO_FEW in why:
            # Load took its replicas back before anything was learnt: it waits for them again.
            if await self._jobs.update(job, status="queued"):
                again = f"Waiting again: {why}; training starts when its replicas are idle"
                await self._jobs.enter(job.id, "warn", again, source=entry)
            return
        if job.version:
            level, message = "info", f"The job has completed: {why}"
            changed = await self._jobs.update(job, status="succeeded", finished=now)
        else:
            level, message = "error", f"Training ended without a version: {why}"
            error = {"code": "training_failed", "message": why, "param": None}
            changed = await self._jobs.update(job, status="failed", finished=now, error=error)
        if changed:
            await self._jobs.enter(job.id, level, message, source=entry)
            await job_setup.drop_data(self._gateway, job)


async def wish_pause(gateway: Gateway, session: str, job: Job, paused: bool) -> None:
    if paused:
        await sessions.wish(gateway.redis, session, "pause", f"job {job.id} is paused")
    else:
        await sessions.unwish(gateway.redis, session, "pause")


def _numbers(fields: Mapping[str, str]) -> dict[str, str | float]:
    """An event's fields but those that every event has; numbers as numbers."""
    return {k: _number(v) for k, v in fields.items() if k not in ("kind", "adapter")}


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
