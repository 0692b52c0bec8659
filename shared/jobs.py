"""Fine-tuning jobs and uploaded files: records in Redis, file contents on disk.

A job is a wish, carried out by the parts that train anyway: its file goes to the replicas that
become the data's homes, the launcher opens a session once enough of them are Idle, the
coordinator runs the rounds. The job's record follows what ``events`` says about its adapter:

validating_files -> queued (data is at its homes, waiting for Idle replicas) -> running (a
session is open; each published version is a checkpoint) -> succeeded | failed | cancelled.

Every gateway may enter the same event: each is entered once (``enter``).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson
from redis.asyncio import Redis

from shared import names

ENDED = frozenset({"succeeded", "failed", "cancelled"})
EVENTS_MAXLEN = 10_000
SEEN_SECONDS = 7 * 24 * 3600

# The entry is added unless its source was entered before, and the numbers that come with it are
# added to the record. KEYS: events, seen, record. ARGV[1] source id or '', [2] length, [3] seconds,
# [4] how many numbers, names and numbers, then fields.
_ENTER = """
if ARGV[1] ~= '' then
  if redis.call('SADD', KEYS[2], ARGV[1]) == 0 then return 0 end
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
local at = 5
for _ = 1, tonumber(ARGV[4]) do
  if redis.call('EXISTS', KEYS[3]) == 1 then
    redis.call('HINCRBYFLOAT', KEYS[3], ARGV[at], ARGV[at + 1])
  end
  at = at + 2
end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', unpack(ARGV, at))
return 1
"""
# Move a job to a state unless it has ended. KEYS[1] record. ARGV: fields.
_UPDATE = """
local status = redis.call('HGET', KEYS[1], 'status')
if not status or status == 'succeeded' or status == 'failed' or status == 'cancelled' then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file. Its bytes lie in ``<data_dir>/files/<id>``."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: float  # Redis seconds


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A fine-tuning job. Times in Redis seconds, 0 = not yet."""

    id: str
    tenant: str
    model: str  # base model
    adapter: str  # what it trains; the fine-tuned model's name
    training_file: str
    validation_file: str = ""
    suffix: str = ""
    seed: int = 0
    created: float = 0.0
    finished: float = 0.0
    status: str = "validating_files"
    paused: bool = False
    session: str = ""  # the session that runs, or ran last
    version: str = ""  # last published version; "" = none yet
    trained_tokens: int = 0  # in rounds that are done
    rounds_done: int = 0  # also those whose version was not promoted
    round_seconds: float = 0.0  # of them together
    rounds_left: int = 0  # at most, when it was last heard of
    heard: float = 0.0  # when that was
    homes: tuple[str, ...] = ()  # replicas that hold its data
    hyperparameters: dict[str, Any] = {}  # as asked for, in OpenAI's terms
    metadata: dict[str, str] = {}
    error: dict[str, str | None] = {}  # code, message, param
    request: str = ""  # the body that asked for it, for a gateway that takes its set-up over


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job."""

    id: str  # stream entry id
    created: float
    level: str  # info | warn | error
    message: str
    type: str = "message"  # message | metrics
    data: dict[str, Any] = {}


T = TypeVar("T", File, Job)


def new_id(kind: str) -> str:
    """``file-…`` or ``ftjob-…``."""
    return f"{kind}-{secrets.token_hex(12)}"


def to_hash(record: File | Job) -> dict[str, str]:
    """Text fields as text, the rest as JSON."""
    plain = msgspec.to_builtins(record)
    return {k: v if isinstance(v, str) else orjson.dumps(v).decode() for k, v in plain.items()}


def from_hash(raw: Mapping[bytes, bytes], kind: type[T]) -> T:
    """Fields that the record no longer has are passed over.

    Raises msgspec.ValidationError or orjson.JSONDecodeError on a damaged record.
    """
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        value = raw.get(field.name.encode())
        if value is not None:
            values[field.name] = value.decode() if field.type is str else orjson.loads(value)
    return msgspec.convert(values, kind)


def path(data_dir: Path, file_id: str) -> Path:
    """Where a file's bytes lie. The id is one of ours: it came out of a record."""
    return data_dir / "files" / file_id


class Jobs:
    """Records of files and jobs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def add(self, record: File | Job) -> None:
        index, key = _keys(type(record), record.id)
        pipe = self._redis.pipeline(transaction=True)
        pipe.hset(key, mapping=to_hash(record))
        pipe.zadd(index, {record.id: record.created})
        if isinstance(record, Job):
            pipe.set(names.jobs_of_adapter(record.adapter), record.id)
        await pipe.execute()

    async def get(self, kind: type[T], record_id: str) -> T | None:
        raw = await self._redis.hgetall(_keys(kind, record_id)[1])
        return from_hash(raw, kind) if raw else None

    async def all(self, kind: type[T], tenant: str | None = None) -> list[T]:
        """Newest first; ``tenant`` None: everybody's."""
        index = _keys(kind, "")[0]
        found = []
        ids = [raw.decode() for raw in await self._redis.zrevrange(index, 0, -1)]
        pipe = self._redis.pipeline(transaction=False)
        for record_id in ids:
            pipe.hgetall(_keys(kind, record_id)[1])
        for raw in await pipe.execute() if ids else []:
            if raw:
                record = from_hash(raw, kind)
                if tenant is None or record.tenant == tenant:
                    found.append(record)
        return found

    async def forget(self, kind: type[File] | type[Job], record_id: str) -> bool:
        index, key = _keys(kind, record_id)
        pipe = self._redis.pipeline(transaction=True)
        pipe.delete(key)
        pipe.zrem(index, record_id)
        gone, _ = await pipe.execute()
        return bool(gone)

    async def update(self, job: Job, **changes: Any) -> bool:
        """Change fields of a job that has not ended; False when it has."""
        changed = to_hash(msgspec.structs.replace(job, **changes))
        flat = [item for name in changes for item in (name, changed[name])]
        return bool(await self._redis.eval(_UPDATE, 1, names.job(job.id), *flat))

    async def of_adapter(self, adapter: str) -> Job | None:
        """The job that trains this adapter."""
        raw = await self._redis.get(names.jobs_of_adapter(adapter))
        return await self.get(Job, raw.decode()) if raw else None

    async def enter(
        self,
        job_id: str,
        level: str,
        message: str,
        *,
        source: str = "",
        kind: str = "message",
        data: Mapping[str, Any] | None = None,
        add: Mapping[str, int | float] | None = None,
    ) -> bool:
        """Add to the job's events; False when ``source`` (an id of ``events``) is in already.

        ``add``: what is added to numbers of the record, once with the entry.
        """
        numbers = [str(item) for pair in (add or {}).items() for item in pair]
        fields = (
            "level",
            level,
            "message",
            message,
            "type",
            kind,
            "data",
            orjson.dumps(data or {}),
        )
        return bool(
            await self._redis.eval(
                _ENTER,
                3,
                names.job_events(job_id),
                names.job_seen(job_id),
                names.job(job_id),
                source,
                str(EVENTS_MAXLEN),
                str(SEEN_SECONDS),
                str(len(numbers) // 2),
                *numbers,
                *fields,
            )
        )

    async def events(self, job_id: str) -> list[JobEvent]:
        """Newest first."""
        found = []
        for raw, fields in await self._redis.xrevrange(names.job_events(job_id)):
            entry = raw.decode()
            found.append(
                JobEvent(
                    id=entry,
                    created=int(entry.split("-")[0]) / 1e3,
                    level=fields[b"level"].decode(),
                    message=fields[b"message"].decode(),
                    type=fields[b"type"].decode(),
                    data=orjson.loads(fields[b"data"]),
                )
            )
        return found


def _keys(kind: type[File] | type[Job], record_id: str) -> tuple[str, str]:
    if kind is File:
        return names.FILES, names.file(record_id)
    return names.JOBS, names.job(record_id)
