"""``collm events``: the audit log of the cluster, past and present."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer
from redis.asyncio import Redis

from collm.console import out
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared import names
from shared.redis_client import BLOCK_MS, connect


def register(app: typer.Typer) -> None:
    app.command()(events)


def events(
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="How many of the last")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as they happen")] = False,
    kind: Annotated[str | None, typer.Option(help="Only this kind, such as state")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """State changes, sessions, rounds: who did what, when and why."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        try:
            asyncio.run(_show(url, count, follow, kind, as_json))
        except KeyboardInterrupt:
            return


async def _show(url: str, count: int, follow: bool, kind: str | None, as_json: bool) -> None:
    async with connect(url) as redis:
        last, found = "0-0", await _last(redis, count, kind)
        newest = await redis.xrevrange(names.EVENTS, count=1)
        if newest:
            last = newest[0][0].decode()
        for entry in found:
            _print(entry, as_json)
        while follow:
            answer = await redis.xread({names.EVENTS: last}, count=100, block=BLOCK_MS)
            for _, entries in answer or []:
                for entry_id, raw in entries:
                    last = entry_id.decode()
                    entry = _entry(entry_id, raw)
                    if kind in (None, entry["kind"]):
                        _print(entry, as_json)


async def _last(redis: Redis, count: int, kind: str | None) -> list[dict[str, str]]:
    """The last ``count`` events of a kind, oldest first."""
    found: list[dict[str, str]] = []
    upper = "+"
    while len(found) < count:
        page = await redis.xrevrange(names.EVENTS, max=upper, count=500)
        if not page:
            break
        entries = [_entry(entry_id, raw) for entry_id, raw in page]
        found += [e for e in entries if kind in (None, e["kind"])]
        upper = "(" + page[-1][0].decode()
    return found[:count][::-1]


def _entry(entry_id: bytes, raw: dict[bytes, bytes]) -> dict[str, str]:
    fields = {k.decode(): v.decode(errors="replace") for k, v in raw.items()}
    return {"id": entry_id.decode(), "kind": fields.pop("kind", "?"), **fields}


def _print(entry: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry), flush=True)
        return
    import datetime

    fields: dict[str, Any] = dict(entry)
    milliseconds = int(fields.pop("id").split("-")[0])
    fields.pop("time", None)
    when = datetime.datetime.fromtimestamp(milliseconds / 1000).strftime("%H:%M:%S.%f")[:-3]
    kind = fields.pop("kind")
    rest = " ".join(f"{k}={v}" for k, v in fields.items() if v != "")
    out.print(f"{when} {kind:<14} {rest}", markup=False, highlight=False, soft_wrap=True)
