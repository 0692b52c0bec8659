"""``collm events``: the audit log of the cluster, past and present."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Annotated

import typer
from redis.asyncio import Redis

from collm import moments
from collm.console import fail, out
from collm.moments import BadMoment
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared import names
from shared.redis_client import BLOCK_MS, connect

HIDDEN = ("id", "kind", "time")


def register(app: typer.Typer) -> None:
    app.command()(events)


def events(
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=0, help="How many of the last; 20, or all --since"),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as they happen")] = False,
    kind: Annotated[str | None, typer.Option(help="Only this kind, such as state")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="2h|ISO", help="Only from then on: 30m, 2h, 1d, a time")
    ] = None,
    utc: Annotated[bool, typer.Option("--utc", help="Times in UTC, not in local time")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """State changes, sessions, rounds: who did what, when and why."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        try:
            asyncio.run(_show(url, _Asked(count, kind, since, utc, as_json), follow))
        except BadMoment as e:
            fail(f"--since: {e}")
        except KeyboardInterrupt:
            return


@dataclass(frozen=True)
class _Asked:
    """Which events, and how they are shown."""

    count: int | None
    kind: str | None
    since: str | None
    utc: bool
    as_json: bool


async def _show(url: str, asked: _Asked, follow: bool) -> None:
    async with connect(url) as redis:
        last, found = "0-0", await _last(redis, asked)
        newest = await redis.xrevrange(names.EVENTS, count=1)
        if newest:
            last = newest[0][0].decode()
        for entry in found:
            _print(entry, asked)
        while follow:
            answer = await redis.xread({names.EVENTS: last}, count=100, block=BLOCK_MS)
            for _, entries in answer or []:
                for entry_id, raw in entries:
                    last = entry_id.decode()
                    entry = _entry(entry_id, raw)
                    if asked.kind in (None, entry["kind"]):
                        _print(entry, asked)


async def _last(redis: Redis, asked: _Asked) -> list[dict[str, str]]:
    """The last events of a kind, or those since a moment, oldest first. Raises BadMoment."""
    found: list[dict[str, str]] = []
    lower, upper, count = "-", "+", 20 if asked.count is None else asked.count
    if asked.since is not None:
        seconds, _ = await redis.time()
        lower = str(max(0, int(1000 * moments.since(asked.since, seconds, utc=asked.utc))))
        count = sys.maxsize if asked.count is None else count
    while len(found) < count:
        page = await redis.xrevrange(names.EVENTS, max=upper, min=lower, count=500)
        if not page:
            break
        entries = [_entry(entry_id, raw) for entry_id, raw in page]
        found += [e for e in entries if asked.kind in (None, e["kind"])]
        upper = "(" + page[-1][0].decode()
    return found[:count][::-1]


def _entry(entry_id: bytes, raw: dict[bytes, bytes]) -> dict[str, str]:
    fields = {k.decode(): v.decode(errors="replace") for k, v in raw.items()}
    return {"id": entry_id.decode(), "kind": fields.pop("kind", "?"), **fields}


def _print(entry: dict[str, str], asked: _Asked) -> None:
    if asked.as_json:
        print(json.dumps(entry), flush=True)
        return
    when, kind = moments.stamp(moments.of_entry(entry["id"]), utc=asked.utc), entry["kind"]
    rest = " ".join(f"{k}={v}" for k, v in entry.items() if v != "" and k not in HIDDEN)
    out.print(f"{when} {kind:<14} {rest}", markup=False, highlight=False, soft_wrap=True)
