"""Byte blobs in Redis: how adapter tensors (safetensors bytes) pass between replicas.

One hash a blob: fields ``0``, ``1``, … hold chunks of at most 64 MiB (Redis refuses values over
512 MiB, however large the blob), field ``head`` comes last and says how many bytes and which
checksum; a reader that finds no head finds no blob. The whole key expires. A checksum guards
against a blob that was written twice under one id.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from shared import names

CHUNK_BYTES = 64 << 20
LIMIT_BYTES = 2 << 30
TTL_SECONDS = 3600  # longer than a round: the first client's update waits for the last one's


class BlobError(RuntimeError):
    """A blob is missing, expired, damaged or too large; the message names it and says which."""


def chunks(data: bytes, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """``data`` in pieces of at most ``size`` bytes, without copying; empty data has none."""
    view = memoryview(data)
    for start in range(0, len(view), size):
        yield view[start : start + size]


def _head(data: bytes, chunk_bytes: int) -> bytes:
    count = -(-len(data) // chunk_bytes)
    return orjson.dumps({"bytes": len(data), "chunks": count, "crc32": zlib.crc32(data)})


def _check_size(blob_id: str, data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise BlobError(
            f"blob {blob_id}: {len(data)} bytes exceed the limit of {limit}; pass a path or use "
            "the process group"
        )


def _parse_head(blob_id: str, raw: bytes | None, limit: int) -> dict[str, int]:
    if raw is None:
        raise BlobError(f"blob {blob_id}: not there (expired, deleted or never completed)")
    head: dict[str, int] = orjson.loads(raw)
    if head["bytes"] > limit:
        raise BlobError(f"blob {blob_id}: {head['bytes']} bytes exceed the limit of {limit}")
    return head


def _join(blob_id: str, head: Mapping[str, int], parts: list[bytes | None]) -> bytes:
    if any(part is None for part in parts):
        raise BlobError(f"blob {blob_id}: a chunk is missing (expired while it was read)")
    data = b"".join(part for part in parts if part is not None)
    if len(data) != head["bytes"] or zlib.crc32(data) != head["crc32"]:
        raise BlobError(f"blob {blob_id}: damaged: checksum or length differs from its head")
    return data


async def put(
    redis: Redis,
    blob_id: str,
    data: bytes,
    *,
    ttl: float = TTL_SECONDS,
    limit: int = LIMIT_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Store ``data`` for ``ttl`` seconds; an older blob of this id is replaced.

    Raises BlobError when it exceeds ``limit`` bytes.
    """
    _check_size(blob_id, data, limit)
    key = names.blob(blob_id)
    await redis.delete(key)
    for i, part in enumerate(chunks(data, chunk_bytes)):
        await redis.hset(key, str(i), bytes(part))
        await redis.pexpire(key, int(ttl * 1000))
    await redis.hset(key, "head", _head(data, chunk_bytes))
    await redis.pexpire(key, int(ttl * 1000))


async def get(redis: Redis, blob_id: str, *, limit: int = LIMIT_BYTES) -> bytes:
    """The bytes of a blob. Raises BlobError when missing, incomplete, damaged or too large."""
    key = names.blob(blob_id)
    head = _parse_head(blob_id, await redis.hget(key, "head"), limit)
    parts = [await redis.hget(key, str(i)) for i in range(head["chunks"])]
    return _join(blob_id, head, parts)


async def delete(redis: Redis, *blob_ids: str) -> None:
    """Forget blobs before their time; unknown ids are fine."""
    if blob_ids:
        await redis.delete(*(names.blob(b) for b in blob_ids))


def put_sync(
    redis: SyncRedis,
    blob_id: str,
    data: bytes,
    *,
    ttl: float = TTL_SECONDS,
    limit: int = LIMIT_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """``put`` for a process without an event loop (the training worker)."""
    _check_size(blob_id, data, limit)
    key = names.blob(blob_id)
    redis.delete(key)
    for i, part in enumerate(chunks(data, chunk_bytes)):
        redis.hset(key, str(i), bytes(part))
        redis.pexpire(key, int(ttl * 1000))
    redis.hset(key, "head", _head(data, chunk_bytes))
    redis.pexpire(key, int(ttl * 1000))


def get_sync(redis: SyncRedis, blob_id: str, *, limit: int = LIMIT_BYTES) -> bytes:
    """``get`` for a process without an event loop. Raises BlobError."""
    key = names.blob(blob_id)
    raw: Any = redis.hget(key, "head")
    head = _parse_head(blob_id, raw, limit)
    parts: list[Any] = [redis.hget(key, str(i)) for i in range(head["chunks"])]
    return _join(blob_id, head, parts)
