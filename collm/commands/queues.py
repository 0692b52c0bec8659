"""``collm queues`` and ``collm forget``: streams and replicas at a glance."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from collm import cluster
from collm.console import fail, out
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared import names
from shared.redis_client import connect


def register(app: typer.Typer) -> None:
    app.command()(queues)
    app.command()(forget)


def queues(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Streams with length and pending entries; replicas with state and load."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        found, logs = asyncio.run(_look(url))
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    out.print(_streams(found.streams, "stream"), _replicas(found.replicas))
    out.print(_streams(logs, "log (bounded, never drained)"))


def forget(
    replica: Annotated[str, typer.Argument(help="Id of a replica that is dead or stopped")],
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Remove the record of a replica that will not come back."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        refused = asyncio.run(_forget(url, replica))
    if refused:
        fail(refused)


async def _look(url: str) -> tuple[cluster.Queues, dict[str, cluster.Stream]]:
    async with connect(url) as redis:
        logs = {name: await cluster.stream(redis, name) for name in sorted(cluster.LOGS)}
        return await cluster.queues(redis), logs


async def _forget(url: str, replica: str) -> str | None:
    async with connect(url) as redis:
        if not await redis.sismember(names.REPLICAS, replica):
            return f"no replica {replica!r} is known"
        return await cluster.forget(redis, replica)


def _streams(streams: dict[str, cluster.Stream], title: str) -> Table:
    table = Table(title, "length", "pending", box=None, pad_edge=False)
    for name, s in streams.items():
        style = "bold" if s.length or s.pending else "dim"
        table.add_row(name, str(s.length), str(s.pending), style=style)
    return table


def _replicas(replicas: list[cluster.Replica]) -> Table:
    table = Table("replica", "state", "model", "b", "in flight", "adapters", box=None)
    for r in replicas:
        adapters = " ".join(f"{name}@{version}" for name, version in sorted(r.adapters.items()))
        table.add_row(r.id, r.state, r.model, str(r.b), str(r.in_flight), adapters)
    return table
