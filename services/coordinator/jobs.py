"""rq jobs of the replicas' training processes, seen from an event loop.

Enqueued by name (the coordinator never imports torch) under ids that follow from what they are
for: a coordinator that takes a round up finds the jobs of its predecessor instead of making new
ones. What a job returns or why it failed comes from rq's result.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, TypeVar

import msgspec
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from rq import Queue
from rq.command import send_stop_job_command
from rq.exceptions import DuplicateJobError, InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from shared import names
from shared.rounds import from_json, to_json

log = logging.getLogger(__name__)

KEEP = 6 * 3600  # seconds that results and failures stay
POLL = 0.05  # seconds between looks at unfinished jobs
FIRST_POLL = 0.005  # after enqueuing: many a job is short, and others wait for it
ENDED = frozenset({"finished", "failed", "stopped", "canceled"})

R = TypeVar("R", bound=msgspec.Struct)


class JobFailed(RuntimeError):
    """A job ended without a result; the message is its last line or how it ended."""


def job_id(*parts: str | int) -> str:
    """Letters, digits, dashes and underscores, as rq wants it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", "-".join(str(p) for p in parts))


class TrainingJobs:
    """All calls into rq run in threads; looking at many jobs is one round trip."""

    def __init__(self, redis: Redis, sync: SyncRedis) -> None:
        self._redis, self._sync = redis, sync

    async def ensure(
        self,
        replica: str,
        name: str,
        function: str,
        job: msgspec.Struct,
        timeout: float,
        wait: int | None = None,
    ) -> None:
        """Enqueue unless a job of this id exists already (running, done or failed).

        ``wait``: seconds in the queue after which it is forgotten; None = it stays.
        """
        plain = to_json(job)
        await asyncio.to_thread(self._ensure, replica, name, function, plain, timeout, wait)

    def _ensure(
        self,
        replica: str,
        name: str,
        function: str,
        plain: dict[str, Any],
        timeout: float,
        wait: int | None,
    ) -> None:
        queue = Queue(names.train_queue(replica), connection=self._sync, serializer=JSONSerializer)
        try:
            queue.enqueue_call(
                function,
                args=(plain,),
                job_id=name,
                timeout=int(timeout) + 1,
                ttl=wait,
                result_ttl=KEEP,
                failure_ttl=KEEP,
                description=f"{function.rpartition('.')[2]} {name}",
                unique=True,
            )
        except DuplicateJobError:
            log.debug("job %s exists already", name)

    async def ended(self, ids: list[str]) -> set[str]:
        """Those of ``ids`` that have ended in whatever way; unknown ones count as ended."""
        if not ids:
            return set()
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in ids:
                pipe.hget(f"rq:job:{name}", "status")
            states = await pipe.execute()
        return {
            name
            for name, state in zip(ids, states, strict=True)
            if state is None or state.decode() in ENDED
        }

    async def result(self, name: str, kind: type[R]) -> R:
        """What an ended job returned. Raises JobFailed, shared.rounds.BadJob."""
        value = await asyncio.to_thread(self._result, name)
        return from_json(value, kind)

    def _result(self, name: str) -> object:
        try:
            job = Job.fetch(name, connection=self._sync, serializer=JSONSerializer)
        except NoSuchJobError as e:
            raise JobFailed(f"job {name} is unknown (Redis lost it or it expired)") from e
        status = job.get_status()
        if status == JobStatus.FINISHED:
            return job.return_value()
        found = job.latest_result()
        text = (found.exc_string if found is not None else "") or ""
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        raise JobFailed(f"{status.value}{': ' + last.strip() if last else ''}")

    async def run(
        self,
        replica: str,
        name: str,
        function: str,
        job: msgspec.Struct,
        kind: type[R],
        timeout: float,
    ) -> R:
        """Ensure, wait, return the result. Raises JobFailed; TimeoutError after ``timeout``."""
        await self.ensure(replica, name, function, job, timeout)
        pause = FIRST_POLL
        async with asyncio.timeout(timeout):
            while not await self.ended([name]):
                await asyncio.sleep(pause)
                pause = min(POLL, 1.5 * pause)
        return await self.result(name, kind)

    async def stop(self, ids: list[str]) -> None:
        """Take queued jobs out and tell running ones to end; ended ones are left alone."""
        for name in ids:
            await asyncio.to_thread(self._stop, name)

    def _stop(self, name: str) -> None:
        try:
            job = Job.fetch(name, connection=self._sync, serializer=JSONSerializer)
            if job.get_status() == JobStatus.STARTED:
                send_stop_job_command(self._sync, name, serializer=JSONSerializer)
            elif job.get_status().value not in ENDED:
                job.cancel()
        except (NoSuchJobError, InvalidJobOperation) as e:
            log.info("job %s cannot be stopped: %s", name, e)
