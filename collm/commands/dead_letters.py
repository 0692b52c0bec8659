"""``collm dead-letters``: what could not be processed, and putting it back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer
from redis.asyncio import Redis
from rich.table import Table

from collm.console import fail, out, tell
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared import names
from shared.dead_letters import FIELD
from shared.redis_client import connect

Entry = tuple[bytes, dict[bytes, bytes]]
Id = Annotated[str, typer.Argument(help="Id as `collm dead-letters list` shows it")]
T = TypeVar("T")


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What could not be processed.", no_args_is_help=True)
    group.command("list")(list_)
    group.command()(show)
    group.command()(requeue)
    app.add_typer(group, name="dead-letters")


def list_(
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many of the last")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """The last dead letters, newest first."""
    entries = _ask(redis, data_dir, lambda r: r.xrevrange(names.DEAD_LETTERS, count=count))
    if as_json:
        for entry in entries:
            print(json.dumps(_facts(entry)))
        return
    table = Table("id", "from", "by", "reason")
    for facts in map(_facts, entries):
        table.add_row(facts["id"], facts["stream"], facts["by"], facts["reason"])
    out.print(table if entries else "no dead letters")


def show(id: Id, redis: RedisOption = None, data_dir: DataOption = None) -> None:
    """Every field of one dead letter; bytes that are no text as hex."""
    entry = _ask(redis, data_dir, lambda r: _one(r, id))
    if entry is None:
        fail(f"no dead letter {id}")
    for name, value in entry[1].items():
        print(f"{name.decode(errors='replace')}: {_text(value)}")


def requeue(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids; none with --all")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Put dead letters back into the stream they came from, as they were."""
    if bool(ids) == everything:
        fail("name the ids to put back, or --all")
    done, refused = _ask(redis, data_dir, lambda r: _requeue(r, ids))
    for line in refused:
        tell(line)
    print(f"{done} put back, {len(refused)} not")
    if refused:
        raise typer.Exit(1)


async def _requeue(redis: Redis, ids: list[str] | None) -> tuple[int, list[str]]:
    if ids is None:
        entries = await redis.xrange(names.DEAD_LETTERS)
        missing: list[str] = []
    else:
        found = {i: await _one(redis, i) for i in ids}
        entries = [e for e in found.values() if e is not None]
        missing = [f"no dead letter {i}" for i, e in found.items() if e is None]
    done = 0
    for entry_id, fields in entries:
        original = {k.removeprefix(FIELD): v for k, v in fields.items() if k.startswith(FIELD)}
        if not original or b"stream" not in fields:
            missing.append(f"{entry_id.decode()}: holds no whole entry; nothing to put back")
            continue
        async with redis.pipeline(transaction=True) as pipe:
            pipe.xadd(fields[b"stream"], original)
            pipe.xdel(names.DEAD_LETTERS, entry_id)
            await pipe.execute()
        done += 1
    return done, missing


async def _one(redis: Redis, entry_id: str) -> Entry | None:
    found: list[Entry] = await redis.xrange(names.DEAD_LETTERS, min=entry_id, max=entry_id)
    return found[0] if found else None


def _ask(redis: str | None, data_dir: DataOption, question: Callable[[Redis], Awaitable[T]]) -> T:
    async def ask(url: str) -> T:
        async with connect(url) as client:
            return await question(client)

    url = redis_url(redis, data_dir)
    with redis_errors():
        return asyncio.run(ask(url))


def _facts(entry: Entry) -> dict[str, str]:
    entry_id, fields = entry
    named = {n: _text(fields.get(n.encode(), b"")) for n in ("stream", "by", "reason")}
    return {"id": entry_id.decode(), **named}


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "0x" + value.hex()
