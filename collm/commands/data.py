"""``collm data add|list|remove``: training files on the replicas that keep them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from redis.asyncio import Redis
from rich.table import Table

from collm.console import fail, out
from collm.waiting import states, telling
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared import data_homes, names, training_data
from shared.adapter_files import BadName
from shared.data_homes import NoHome
from shared.records import ReplicaRecord
from shared.redis_client import connect
from shared.tail import just_before

WAIT = 30.0  # seconds for a replica's answer

app = typer.Typer(help="Training files: each lies on one replica and nowhere else.")


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="data", no_args_is_help=True)


class NotStored(RuntimeError):
    """A replica refused or did not answer; says which and why."""


@app.command()
def add(
    file: Annotated[Path, typer.Argument(help="JSON Lines of chats, or Alpaca or ShareGPT JSON")],
    adapter: Annotated[str, typer.Option(help="Adapter that learns from it")],
    replica: Annotated[str, typer.Option(help="Its home; none: chosen by hash")] = "",
    model: Annotated[str, typer.Option(help="Base model, where several are served")] = "",
    shard: Annotated[
        int, typer.Option(min=1, help="Deal the samples out to this many replicas")
    ] = 1,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Give a training file to a replica; idle replicas with data start to learn by themselves."""
    try:
        samples = len(training_data.load(file).chats)
        raw = file.read_bytes()
    except training_data.DataError as e:
        fail(str(e))
    if shard > 1 and file.suffix != ".jsonl":
        fail(f"{file}: only JSON Lines can be dealt out (--shard)")
    url = redis_url(redis, data_dir)
    with redis_errors():
        try:
            homes = asyncio.run(_add(url, file, raw, adapter, replica, model, shard))
        except (NoHome, NotStored, BadName) as e:
            fail(str(e))
    for home, count in homes.items():
        out.print(f"{count} of {samples} samples for {adapter} on {home}", highlight=False)


@app.command("list")
def show(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """How many samples each replica holds for which adapter."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        records = asyncio.run(_records(url))
    held = {r.id: r.data for r in records if r.data}
    if as_json:
        print(json.dumps(held))
        return
    table = Table("replica", "adapter", "samples", box=None, pad_edge=False)
    for home, data in sorted(held.items()):
        for adapter, count in sorted(data.items()):
            table.add_row(home, adapter, str(count))
    out.print(table)


@app.command()
def remove(
    adapter: Annotated[str, typer.Option(help="Adapter whose data is deleted")],
    file: Annotated[str, typer.Option(help="Name of one file; none: all of them")] = "",
    replica: Annotated[str, typer.Option(help="Only on this replica")] = "",
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Delete training files where they lie."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        try:
            gone = asyncio.run(_remove(url, adapter, file, replica))
        except (NotStored, BadName) as e:
            fail(str(e))
    out.print(f"{gone} files deleted", highlight=False)


async def _add(
    url: str, file: Path, raw: bytes, adapter: str, replica: str, model: str, shard: int
) -> dict[str, str]:
    """Home -> samples stored there. Raises NoHome, NotStored, BadName."""
    async with connect(url) as redis:
        homes = [replica] if replica else await _homes(redis, adapter, file, model, shard)
        since, tickets = await just_before(redis), dict[str, str]()
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip(".-") or "data"
        name = f"{name[:80]}-{hashlib.sha256(raw).hexdigest()[:8]}"
        parts = [raw] if len(homes) == 1 else list(data_homes.shards(raw, len(homes)))
        for home, part in zip(homes, parts, strict=True):
            ticket = await data_homes.send(redis, home, adapter, name, part, file.suffix)
            tickets[ticket] = home
        found = await _answers(redis, tickets, since)
        return {home: found[ticket]["samples"] for ticket, home in tickets.items()}


async def _homes(redis: Redis, adapter: str, file: Path, model: str, shard: int) -> list[str]:
    records = [r for r in await _read(redis) if r.state not in ("dead", "stopped", "draining")]
    models = sorted({r.model for r in records})
    if not model and len(models) > 1:
        raise NoHome(f"several models are served ({', '.join(models)}): name one with --model")
    here = [r for r in records if model in ("", r.model)]
    able = [r.id for r in here if r.trains] or [r.id for r in here]
    if len(able) < shard:
        raise NoHome(f"{shard} replicas wanted, {len(able)} are there")
    return data_homes.choose(able, f"{adapter}/{file.name}", shard)


async def _remove(url: str, adapter: str, file: str, replica: str) -> int:
    async with connect(url) as redis:
        records = [r for r in await _read(redis) if adapter in r.data]
        homes = [r.id for r in records if replica in ("", r.id)]
        since = await just_before(redis)
        tickets = {await data_homes.send_delete(redis, h, adapter, file): h for h in homes}
        found = await _answers(redis, tickets, since)
        return sum(int(f["files"]) for f in found.values())


async def _answers(redis: Redis, tickets: dict[str, str], since: str) -> dict[str, dict[str, str]]:
    waits = data_homes.answers(redis, list(tickets), since, WAIT)
    found = await telling(waits, lambda: states(redis, tickets.values()))
    for ticket, home in tickets.items():
        if ticket not in found:
            _refuse(home, f"no answer within {WAIT:.0f} s; is it running?")
        if found[ticket]["ok"] != "1":
            _refuse(home, found[ticket]["why"])
    return found


def _refuse(home: str, why: str) -> NoReturn:
    raise NotStored(f"{home}: {why}")


async def _records(url: str) -> list[ReplicaRecord]:
    async with connect(url) as redis:
        return await _read(redis)


async def _read(redis: Redis) -> list[ReplicaRecord]:
    found = []
    for raw in sorted(await redis.smembers(names.REPLICAS)):
        record = await redis.hgetall(names.replica(raw.decode()))
        if record:
            found.append(ReplicaRecord.from_hash(record))
    return found
