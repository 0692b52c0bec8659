"""Fine-tuning by hand: one running replica trains an adapter and publishes it.

The steps that the coordinator takes for a session, for a single client and a single round: data
to its home, replica Combined, first version where there is none, one ``local_round`` job, the
trained version promoted and loaded wherever the base model is served.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from rq import Queue, Worker
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from shared import adapter_files, data_homes, names, rounds
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.control import send_command
from shared.messages import BODY, Configure, LoadAdapter, TrainSample, decode
from shared.records import ReplicaRecord
from shared.redis_client import connect_sync
from shared.replica_state import State, move
from shared.rounds import InitialiseJob, InitialiseResult, Lora, RoundJob, RoundResult
from shared.tail import follow, just_before

STORE_TIMEOUT = 60.0  # seconds for the replica to check and keep the file
POLL = 0.1  # seconds between looks at the job
ENDED = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)


class FinetuneError(RuntimeError):
    """Fine-tuning could not be done; the message says why and what to do."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to train. Sizes in samples, steps of the optimiser."""

    adapter: str
    data: Path | None
    replica: str = ""  # "" = chosen
    model: str = ""  # served name of the base; "" = the only one
    lora: Lora = Lora()
    steps: int = 50
    micro_batch: int = 4
    accumulation: int = 8
    learning_rate: float = 5e-4
    max_tokens: int = 512
    heldout: float = 0.1
    publish: str = "on_improvement"
    seed: int = 0
    timeout: float = 24 * 3600.0  # seconds for the whole job


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``version`` is "" when nothing was better than the parent."""

    replica: str
    adapter: str
    version: str
    path: str
    result: RoundResult


class Finetune:
    """One run. ``told`` gets a line of text at each stage and each step."""

    def __init__(
        self, redis: Redis, url: str, data_dir: Path, request: Request, told: Callable[[str], None]
    ) -> None:
        self._redis, self._data_dir, self._request, self._told = redis, data_dir, request, told
        self._registry = AdapterRegistry(redis, data_dir)
        self._sync = connect_sync(url)
        self._lora = request.lora  # of a new adapter; an existing one keeps its own
        self._session = f"manual-{secrets.token_hex(4)}"

    async def run(self) -> Outcome:
        """Raises FinetuneError."""
        record = await self._choose()
        await self._store(record.id)
        await self._register(record.model)
        async with self._combined(record.id):
            parent = await self._parent(record)
            self._told(f"{record.id} trains {self._request.adapter} from version {parent.version}")
            result: RoundResult = await self._train(record, parent)
        return await self._promote(record, parent, result)

    # ------------------------------------------------------------ before

    async def _choose(self) -> ReplicaRecord:
        """A live replica with a training process. Raises FinetuneError."""
        request, seen = self._request, []
        for raw in sorted(await self._redis.smembers(names.REPLICAS)):
            replica = raw.decode()
            if request.replica not in ("", replica):
                continue
            record = ReplicaRecord.from_hash(await self._redis.hgetall(names.replica(replica)))
            why = await self._unfit(record)
            if why is None:
                return record
            seen.append(f"{replica}: {why}")
        if request.replica:
            wanted, unknown = f"replica {request.replica!r} cannot train", "it is not known"
        else:
            wanted, unknown = "no replica can train", "none is known"
        raise FinetuneError(f"{wanted}: {'; '.join(seen) or unknown}")

    async def _unfit(self, record: ReplicaRecord) -> str | None:
        if not await self._redis.exists(names.replica_alive(record.id)):
            return "not alive"
        if self._request.model not in ("", record.model):
            return f"serves {record.model}"
        if record.state not in (State.SERVING, State.IDLE):
            return f"is {record.state}"
        queue = self._queue(record.id)
        if not await asyncio.to_thread(Worker.all, connection=self._sync, queue=queue):
            return (
                "has no training process (it comes after serving; if it stays away, "
                "replica.training is off or the replica's log says why)"
            )
        return None

    async def _store(self, replica: str) -> None:
        """The file goes to the replica as any training data does. Raises FinetuneError."""
        data = self._request.data
        if data is None:
            return
        try:
            raw = data.read_bytes()
        except OSError as e:
            raise FinetuneError(f"{data}: {e.strerror or e}") from e
        since = await just_before(self._redis)
        suffix = data.suffix if data.suffix in data_homes.SUFFIXES else ".jsonl"
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in data.stem) or "data"
        ticket = await data_homes.send(
            self._redis, replica, self._request.adapter, name, raw, suffix
        )
        answer = await data_homes.answers(self._redis, [ticket], since, STORE_TIMEOUT)
        if ticket not in answer:
            raise FinetuneError(f"{replica} did not answer within {STORE_TIMEOUT:.0f} s")
        if answer[ticket]["ok"] != "1":
            raise FinetuneError(answer[ticket]["why"])
        self._told(f"{replica} holds {answer[ticket]['samples']} samples of {data.name}")

    async def _register(self, model: str) -> None:
        lora = self._request.lora
        await self._registry.register(
            self._request.adapter,
            base=model,
            rank=lora.rank,
            lora_alpha=lora.lora_alpha,
            source="job",
        )

    @asynccontextmanager
    async def _combined(self, replica: str) -> AsyncIterator[None]:
        """Combined, with a micro-batch in force, while the block runs; then Serving."""
        why = f"fine-tuning of {self._request.adapter} by hand"
        await move(self._redis, replica, State.COMBINED, by="operator", why=why)
        control, B = names.control(replica), self._request.micro_batch
        await send_command(self._redis, control, Configure(B=B))
        try:
            yield
        finally:
            await send_command(self._redis, control, Configure(B=0))
            await move(self._redis, replica, State.SERVING, by="operator", why=f"{why} has ended")

    async def _parent(self, record: ReplicaRecord) -> AdapterVersion:
        """The current version; a first one is made where there is none."""
        request = self._request
        current = await self._registry.current(request.adapter)
        if current is not None:
            card = adapter_files.read_card(Path(current.path))
            self._lora = Lora(
                rank=card.rank, lora_alpha=card.lora_alpha, target_modules=card.target_modules
            )
            return current
        job = InitialiseJob(
            adapter=request.adapter,
            version="r0",
            lora=request.lora,
            seed=request.seed,
        )
        made = await self._job(record.id, rounds.INITIALISE, job, InitialiseResult)
        entry = AdapterVersion(version=made.version, path=made.path, note="A random, B zero")
        await self._registry.publish(request.adapter, entry, promote=True, expected="")
        return entry

    # ------------------------------------------------------------ training

    async def _train(self, record: ReplicaRecord, parent: AdapterVersion) -> RoundResult:
        request = self._request
        job = RoundJob(
            session=self._session,
            round=parent.round + 1,
            client=record.id,
            adapter=request.adapter,
            base=record.model,
            parent=parent.version,
            parent_path=parent.path,
            lora=self._lora,
            steps=request.steps,
            accumulation=request.accumulation,
            micro_batches=(request.micro_batch,),
            learning_rate=request.learning_rate,
            max_rounds=1,
            max_tokens=request.max_tokens,
            heldout_fraction=request.heldout,
            publish=request.publish,
            seed=request.seed,
        )
        watcher = asyncio.create_task(self._watch(record.id))
        try:
            result: RoundResult = await self._job(record.id, rounds.LOCAL_ROUND, job, RoundResult)
        finally:
            watcher.cancel()
        if result.examples == 0:
            raise FinetuneError(
                f"{record.id} holds no training data for {request.adapter}: give --data FILE"
            )
        return result

    async def _job(self, replica: str, function: str, job: msgspec.Struct, kind: type[Any]) -> Any:
        """Enqueue, wait, convert. A job cancelled with this task is stopped on the replica."""
        queue = self._queue(replica)
        made: Job = await asyncio.to_thread(
            queue.enqueue, function, rounds.to_json(job), job_timeout=int(self._request.timeout)
        )
        try:
            status = await self._ended(made)
        except asyncio.CancelledError:
            await asyncio.to_thread(_stop, made)
            raise
        if status != JobStatus.FINISHED:
            raise FinetuneError(f"{replica}: {await asyncio.to_thread(_reason, made)}")
        value = await asyncio.to_thread(made.return_value)
        return rounds.from_json(value, kind)

    async def _ended(self, job: Job) -> JobStatus:
        while True:
            status: JobStatus = await asyncio.to_thread(job.get_status, refresh=True)
            if status in ENDED:
                return status
            await asyncio.sleep(POLL)

    async def _watch(self, replica: str) -> None:
        """Tell each step that the replica reports."""
        async for _, _, fields in follow(self._redis, [names.METRICS]):
            if fields.get(b"kind") != b"train" or fields.get(b"replica") != replica.encode():
                continue
            s = decode(fields[BODY], TrainSample)
            loss = "-" if s.loss is None else f"{s.loss:.3f}"
            heldout = "" if s.heldout_ce is None else f", held-out {s.heldout_ce:.3f}"
            served = "" if s.version is None else f", serves {s.version}"
            rate = s.tokens / max(1e-9, s.micro_seconds * self._request.accumulation)
            self._told(
                f"step {s.step}/{self._request.steps}: loss {loss}{heldout}, "
                f"{rate:.0f} tokens/s{served}"
            )

    # ------------------------------------------------------------ after

    async def _promote(
        self, record: ReplicaRecord, parent: AdapterVersion, result: RoundResult
    ) -> Outcome:
        """The last published version becomes current, here and on every other replica."""
        name = self._request.adapter
        if not result.published:
            return Outcome(replica=record.id, adapter=name, version="", path="", result=result)
        version = result.published[-1]
        path = str(self._registry.folder(name, version))
        quality = parent.quality
        if result.heldout_before and result.heldout_after:
            quality *= min(2.0, max(0.5, result.heldout_before / result.heldout_after))
        entry = AdapterVersion(
            version=version,
            path=path,
            quality=quality,
            parent=parent.version,
            round=result.round,
            step=result.steps,
            session=self._session,
            heldout_ce=result.heldout_after,
            note="fine-tuning by hand",
        )
        await self._registry.publish(name, entry, promote=True, expected=parent.version)
        for raw in sorted(await self._redis.smembers(names.REPLICAS)):
            model = await self._redis.hget(names.replica(raw.decode()), "model")
            if model == record.model.encode():
                load = LoadAdapter(name=name, version=version, path=path)
                await send_command(self._redis, names.control(raw.decode()), load)
        return Outcome(replica=record.id, adapter=name, version=version, path=path, result=result)

    def _queue(self, replica: str) -> Queue:
        return Queue(names.train_queue(replica), connection=self._sync, serializer=JSONSerializer)


def _stop(job: Job) -> None:
    try:
        send_stop_job_command(job.connection, job.id, serializer=JSONSerializer)
    except InvalidJobOperation:
        job.cancel()  # it had not begun


def _reason(job: Job) -> str:
    """The last line of what the job raised, or its state."""
    result = job.latest_result()
    text = result.exc_string if result is not None and result.exc_string else ""
    return text.strip().rsplit("\n", 1)[-1] or f"the job was {job.get_status()}"
