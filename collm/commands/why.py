"""``collm why REPLICA|REQUEST``: the decisions about it, with the numbers behind them."""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Annotated

import msgspec
import typer

from collm import why as explain
from collm.console import fail, out
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared.redis_client import connect

NAME_HELP = "Id of a replica (replica-2) or of an answer, or a request's x-request-id"
HIDDEN = ("id", "kind", "time", "replica")


def register(app: typer.Typer) -> None:
    app.command()(why)


def why(
    name: Annotated[str, typer.Argument(help=NAME_HELP)],
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many events")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Why is this replica idle, training, serving; why did this request go where it went."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        found, releases = asyncio.run(_look(url, name, count))
    if found is None and not releases:
        fail(f"{name!r} is no known replica, and no kept release names such a request")
    if as_json:
        plain = msgspec.to_builtins(found) if found is not None else {"releases": releases}
        print(json.dumps(plain))
    elif found is not None:
        _show_replica(found)
    else:
        _show_request(releases)


async def _look(
    url: str, name: str, count: int
) -> tuple[explain.Explanation | None, list[dict[str, str]]]:
    async with connect(url) as redis:
        found = await explain.replica(redis, name, count)
        return found, [] if found is not None else await explain.request(redis, name)


def _show_replica(found: explain.Explanation) -> None:
    record = found.record
    since = _clock(int(record["since"] * 1000))
    _say(f"{found.replica} is {record['state']} since {since} ({record['by']}): {record['why']}")
    _say(
        f"limits: b {record['b']} (b* {record['b_star']}), B {record['B']} "
        f"(B* {record['B_star']}); quality {record['q']:.3f}"
    )
    for event in found.events:
        fields = " ".join(f"{k}={v}" for k, v in event.items() if k not in HIDDEN and v)
        _say(f"{_clock(int(event['id'].split('-')[0]))} {event['kind']:<14} {fields}")


def _show_request(releases: list[dict[str, str]]) -> None:
    for release in releases:
        when = _clock(int(release["id"].split("-")[0]))
        _say(f"{when} released to {release['replica']} in batch {release['batch']}")
        _say(f"    together with {release['requests']}")
        _say(f"    numbers: {release['numbers']}")
        for name, value in release.items():
            if name.startswith("ended:"):
                _say(f"    {name.removeprefix('ended:')} ended {value}")


def _clock(milliseconds: int) -> str:
    return datetime.datetime.fromtimestamp(milliseconds / 1000).strftime("%H:%M:%S.%f")[:-3]


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)
