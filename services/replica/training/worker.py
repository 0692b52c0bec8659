"""The training process: an rq worker that runs one job at a time on the shared model.

rq's SimpleWorker sends no heartbeat while a job runs: a thread does it here, so that a long job
is not taken for dead and a dead one is noticed. The supervisor restarts a process that died; the
new one puts its predecessor's job back into the queue at once (a replica has one training
process, so a job "started" before it came is nobody's).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import orjson
from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from services.replica import pipes
from services.replica.children import describe
from services.replica.training.config import WorkerConfig
from services.replica.training.context import CONTEXT, TrainingContext
from services.replica.training.gate import Stopped
from shared import logs, names
from shared.redis_client import TRANSIENT, connect_sync

log = logging.getLogger(__name__)

ATTEMPTS = 3  # executions of a job whose process dies under it
MAINTENANCE = 2  # seconds


class ParentGone(RuntimeError):
    """The supervisor is no more; the process ends."""


class TrainingWorker(SimpleWorker):  # type: ignore[misc]
    """Heartbeats during a job, and the job's id where ``check`` can see a stop command."""

    def __init__(self, context: TrainingContext, queue: Queue, name: str, ttl: int) -> None:
        super().__init__(
            [queue],
            name=name,
            connection=queue.connection,
            serializer=JSONSerializer,
            worker_ttl=ttl + 15,  # rq blocks for worker_ttl - 15 seconds
            maintenance_interval=MAINTENANCE,
            job_monitoring_interval=ttl,
        )
        self.context = context
        self._ttl = ttl

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds after which a job without a heartbeat counts as abandoned."""
        return self._ttl

    def execute_job(self, job: Job, queue: Queue) -> None:
        context = self.context
        context.check = _Check(self, job.id)
        context.synchronise()
        token = CONTEXT.set(context)
        try:
            super().execute_job(job, queue)
        finally:
            CONTEXT.reset(token)

    def perform_job(self, job: Job, queue: Queue, execution: Any) -> bool:
        with self._heartbeats(job, execution):
            done: bool = super().perform_job(job, queue, execution)
        return done

    @contextmanager
    def _heartbeats(self, job: Job, execution: Any) -> Iterator[None]:
        """Every third of the TTL while the block runs. A Redis that is away is tried again."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self._ttl / 3):
                try:
                    self.maintain_heartbeats(job, execution)
                except TRANSIENT as e:
                    log.warning("no heartbeat for job %s: Redis is away (%s)", job.id, e)

        thread = threading.Thread(target=beat, name="job-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def stop_wanted(self, job_id: str) -> bool:
        """Whether ``rq``'s stop command named this job (rq itself cannot interrupt it)."""
        return bool(self._stopped_job_id == job_id)


class _Check:
    """Called at every look of the gate: raises when the job must end."""

    def __init__(self, worker: TrainingWorker, job_id: str) -> None:
        self._worker, self._job_id, self._parent = worker, job_id, os.getppid()

    def __call__(self) -> None:
        if self._worker.stop_wanted(self._job_id):
            raise Stopped(f"job {self._job_id} was stopped on request")
        if os.getppid() != self._parent:
            raise ParentGone("the replica's parent process is gone")


def take_over(queue: Queue, previous_exit: int | None) -> list[str]:
    """Put jobs that a dead predecessor had begun back into ``queue``; returns their ids.

    After ``ATTEMPTS`` executions a job fails instead, and says how its process ended.
    """
    registry = StartedJobRegistry(queue.name, queue.connection, serializer=JSONSerializer)
    requeued = []
    for job_id, execution_id in registry.get_job_and_execution_ids(cleanup=False):
        queue.connection.zrem(registry.key, f"{job_id}:{execution_id}")
        if not Job.exists(job_id, connection=queue.connection):
            continue
        job = Job.fetch(job_id, connection=queue.connection, serializer=JSONSerializer)
        if job.get_status() != JobStatus.STARTED:
            continue
        deaths = int(job.meta.get("deaths", 0)) + 1
        job.meta["deaths"] = deaths
        job.save_meta()
        how = "ended" if previous_exit is None else describe(previous_exit)
        reason = f"the training process {how} during the job"
        if deaths >= ATTEMPTS:
            _fail(job, queue, f"{reason}, {deaths} times: given up")
        else:
            log.warning("job %s: %s; it is queued again", job_id, reason)
            job.set_status(JobStatus.QUEUED)
            queue.push_job_id(job_id, at_front=True)
            requeued.append(job_id)
    return requeued


def _fail(job: Job, queue: Queue, reason: str) -> None:
    log.error("job %s: %s", job.id, reason)
    job.set_status(JobStatus.FAILED)
    with queue.connection.pipeline() as pipe:
        job._handle_failure(reason, pipeline=pipe, worker_name="")
        pipe.execute()


def serve(context: TrainingContext, ready: Any = None) -> None:
    """Run jobs until SIGTERM; after a loss of Redis with new connections."""
    config = context.config
    name = f"{config.replica}-{os.getpid()}-{int(time.time() * 1000)}"
    queue = Queue(
        names.train_queue(config.replica), connection=context.redis, serializer=JSONSerializer
    )
    take_over(queue, config.previous_exit)
    worker = TrainingWorker(context, queue, name, int(context.settings.worker_ttl))
    if ready is not None:
        ready()
    worker.work(logging_level="WARNING")


def _watch(pipe: Connection) -> None:
    """Stop after the present job when the parent says so or is gone.

    A parent that will not wait kills; the job is then taken over at the next start.
    """
    wanted = False
    while not wanted:
        try:
            wanted = bool(orjson.loads(pipe.recv_bytes()).get("stop"))
        except (EOFError, OSError):
            wanted = True
    os.kill(os.getpid(), signal.SIGTERM)


def main(config_json: str, pipe: Connection) -> None:
    """Entry point of the spawned process. Says ``ready`` on the pipe once it takes jobs."""
    config = msgspec.json.decode(config_json, type=WorkerConfig)
    logs.setup(f"training {config.replica}", config.log_level, config.log_format)
    redis: Redis = connect_sync(config.redis_url, socket_timeout=60.0)
    context = TrainingContext(config, redis)
    threading.Thread(target=_watch, args=(pipe,), name="parent-watch", daemon=True).start()
    serve(context, lambda: pipes.send(pipe, {"ready": True}))
