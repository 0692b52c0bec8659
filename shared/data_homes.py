"""Where training data lives: on the replica that received it, and only there.

``<data_dir>/replicas/<id>/data/<adapter>/<file>.jsonl``; what its owner keeps for judging versions
lies in ``heldout/`` beside it. A file travels as a blob to the replica named or chosen by hash; the
replica stores it, counts its training samples into its record and answers with an event. Only
adapter tensors and numbers ever leave a replica.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
from redis.asyncio import Redis

from shared import blobs, names, training_data
from shared.adapter_files import BadName, check_name
from shared.control import send_command
from shared.messages import DeleteData, StoreData
from shared.tail import follow

SUFFIXES = (".jsonl", ".json")
HELDOUT = "heldout"  # folder in an adapter's folder
STREAM_TTL = 600.0  # seconds a file's blob waits for its replica
FILE_LIMIT = 512 << 20  # bytes


class NoHome(RuntimeError):
    """No replica can take the data; the message says what was looked for."""


def folder(data_dir: Path, replica: str, adapter: str) -> Path:
    """Raises adapter_files.BadName."""
    return data_dir / "replicas" / check_name(replica) / "data" / check_name(adapter)


def files(data_dir: Path, replica: str, adapter: str, *, heldout: bool = False) -> list[Path]:
    """The adapter's training files on this replica, or its held-out ones, by name."""
    place = folder(data_dir, replica, adapter)
    if heldout:
        place /= HELDOUT
    return sorted(f for f in place.glob("*") if f.suffix in SUFFIXES) if place.is_dir() else []


def store(
    data_dir: Path,
    replica: str,
    adapter: str,
    file: str,
    raw: bytes,
    suffix: str = ".jsonl",
    *,
    heldout: bool = False,
) -> int:
    """Check a training file and keep it, whole or not at all; returns its samples.

    With ``heldout`` none of it is trained on, and nothing of the other files is held out.

    Raises training_data.DataError naming the line, adapter_files.BadName.
    """
    if suffix not in SUFFIXES:
        raise BadName(f"suffix {suffix!r}: one of {', '.join(SUFFIXES)} expected")
    place = folder(data_dir, replica, adapter)
    if heldout:
        place /= HELDOUT
    place.mkdir(parents=True, exist_ok=True)
    beside = place / f".{check_name(file)}.{secrets.token_hex(4)}"
    try:
        beside.write_bytes(raw)
        try:
            samples = len(training_data.load(beside).chats)
        except training_data.DataError as e:
            raise training_data.DataError(f"{file}{suffix}", e.line, e.reason) from e
        os.replace(beside, place / f"{file}{suffix}")
    finally:
        beside.unlink(missing_ok=True)
    return samples


def delete(data_dir: Path, replica: str, adapter: str, file: str = "") -> int:
    """Delete one file, or all of the adapter's ("" ); returns how many."""
    gone = 0
    for heldout in (True, False):
        for path in files(data_dir, replica, adapter, heldout=heldout):
            if file in ("", path.stem):
                path.unlink()
                gone += 1
    place = folder(data_dir, replica, adapter)
    for emptied in (place / HELDOUT, place):
        if emptied.is_dir() and not any(emptied.iterdir()):
            emptied.rmdir()
    return gone


def count(data_dir: Path, replica: str) -> dict[str, int]:
    """Adapter -> samples held by this replica; files that cannot be read count as nothing."""
    home = data_dir / "replicas" / check_name(replica) / "data"
    found: dict[str, int] = {}
    for place in sorted(home.iterdir()) if home.is_dir() else ():
        samples = 0
        for path in files(data_dir, replica, place.name):
            try:
                samples += len(training_data.load(path, skip_broken=True).chats)
            except training_data.DataError:
                continue  # stored files were checked; a damaged one is no data
        if samples:
            found[place.name] = samples
    return found


async def refresh(redis: Redis, data_dir: Path, replica: str) -> dict[str, int]:
    """Write what the replica holds into its record; at its start and after each change."""
    held = await asyncio.to_thread(count, data_dir, replica)
    await redis.hset(names.replica(replica), "data", orjson.dumps(held))
    return held


async def obey(
    redis: Redis, data_dir: Path, replica: str, command: StoreData | DeleteData
) -> dict[str, str]:
    """Carry out a command on the replica; returns the fields of the event that answers it."""
    answer = {
        "kind": "data_stored" if isinstance(command, StoreData) else "data_deleted",
        "replica": replica,
        "adapter": command.adapter,
        "file": command.file,
        "reply_to": command.reply_to,
        "ok": "1",
        "why": "",
    }
    try:
        if isinstance(command, StoreData):
            raw = await blobs.get(redis, command.blob, limit=FILE_LIMIT)
            samples = await asyncio.to_thread(
                store,
                data_dir,
                replica,
                command.adapter,
                command.file,
                raw,
                command.suffix,
                heldout=command.heldout,
            )
            await blobs.delete(redis, command.blob)
            answer["samples"] = str(samples)
        else:
            gone = await asyncio.to_thread(delete, data_dir, replica, command.adapter, command.file)
            answer["files"] = str(gone)
        await refresh(redis, data_dir, replica)
    except (training_data.DataError, blobs.BlobError, BadName, OSError) as e:
        return {**answer, "ok": "0", "why": str(e)}
    return answer


# ---------------------------------------------------------------- the sender's side


def choose(replicas: Sequence[str], key: str, many: int = 1) -> list[str]:
    """The ``many`` homes of ``key`` among ``replicas``: highest hash of (key, replica) first.

    A replica that comes or goes moves only what is its own (rendezvous hashing).
    """

    def weight(replica: str) -> bytes:
        return hashlib.sha256(f"{key}\0{replica}".encode()).digest()

    if not replicas:
        raise NoHome("no live replica of that base model to keep the data")
    return sorted(replicas, key=weight, reverse=True)[:many]


def shards(raw: bytes, many: int) -> Iterator[bytes]:
    """A training file dealt out sample by sample to ``many`` parts (with the owner's consent).

    The parts are JSON Lines. A file that is no JSON goes out line by line: its home names the
    fault.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    lines = [line for line in raw.split(b"\n") if line.strip()]
    if raw.lstrip()[:1] == b"[":
        with contextlib.suppress(orjson.JSONDecodeError):
            lines = [orjson.dumps(record) for record in orjson.loads(raw)]
    for part in range(many):
        yield b"\n".join(lines[part::many]) + b"\n"


async def send(
    redis: Redis,
    replica: str,
    adapter: str,
    file: str,
    raw: bytes,
    suffix: str = ".jsonl",
    *,
    heldout: bool = False,
) -> str:
    """Hand a file to a replica; returns the correlation id of the event that will answer."""
    ticket = f"data-{secrets.token_hex(8)}"
    await blobs.put(redis, ticket, raw, ttl=STREAM_TTL, limit=FILE_LIMIT)
    order = StoreData(
        adapter=check_name(adapter),
        file=check_name(file),
        blob=ticket,
        suffix=suffix,
        heldout=heldout,
        reply_to=ticket,
    )
    await send_command(redis, names.control(replica), order, adapter=adapter)
    return ticket


async def send_delete(redis: Redis, replica: str, adapter: str, file: str = "") -> str:
    """Ask a replica to delete; returns the correlation id of the event that will answer."""
    ticket = f"data-{secrets.token_hex(8)}"
    order = DeleteData(adapter=check_name(adapter), file=file, reply_to=ticket)
    await send_command(redis, names.control(replica), order, adapter=adapter)
    return ticket


async def answers(
    redis: Redis, tickets: Sequence[str], since: str, timeout: float
) -> dict[str, dict[str, str]]:
    """Ticket -> the event's fields, for those that were answered within ``timeout`` seconds.

    ``since`` is an entry id of ``events`` from before the commands were sent.
    """
    wanted, found = set(tickets), dict[str, dict[str, str]]()
    try:
        async with asyncio.timeout(timeout):
            async for _, _, fields in follow(redis, [names.EVENTS], since=since):
                plain = {k.decode(): v.decode() for k, v in fields.items()}
                if plain.get("reply_to") in wanted:
                    found[plain["reply_to"]] = plain
                if found.keys() == wanted:
                    return found
    except TimeoutError:
        return found
    return found
