"""``collm adapters list|show|rollback|export|train``: versions of adapters."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.table import Table

from collm.console import fail, out
from collm.where import DataOption, RedisOption, data_folder, redis_errors, redis_url
from shared import names
from shared.adapter_files import BadName
from shared.adapters import (
    Adapter,
    AdapterRegistry,
    AdapterVersion,
    Conflict,
    Unknown,
    replicas_serving,
)
from shared.control import send_command
from shared.messages import LoadAdapter
from shared.redis_client import connect

T = TypeVar("T")
Name = Annotated[str, typer.Argument(help="Name of an adapter")]
Json = Annotated[bool, typer.Option("--json", help="One JSON line")]

app = typer.Typer(help="Adapters: versions, quality, where they are served.")


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="adapters", no_args_is_help=True)


@app.command("list")
def show_all(as_json: Json = False, redis: RedisOption = None, data_dir: DataOption = None) -> None:
    """All adapters with their current versions."""

    async def look(registry: AdapterRegistry) -> list[Adapter]:
        return await registry.all()

    found = _with(redis, data_dir, look)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    table = Table("adapter", "base", "rank", "current", "Q", "tenant", box=None, pad_edge=False)
    for a in found:
        table.add_row(a.name, a.base, str(a.rank), a.current or "-", f"{a.quality:.3f}", a.tenant)
    out.print(table)


@app.command()
def show(
    name: Name, as_json: Json = False, redis: RedisOption = None, data_dir: DataOption = None
) -> None:
    """One adapter: versions with quality and held-out loss, and which replica serves which."""

    async def look(
        registry: AdapterRegistry,
    ) -> tuple[Adapter | None, list[AdapterVersion], dict[str, str]]:
        return (
            await registry.get(name),
            await registry.versions(name),
            await replicas_serving(registry.redis, name),
        )

    adapter, versions, serving = _with(redis, data_dir, look)
    if adapter is None:
        fail(f"no adapter {name!r} is registered")
    if as_json:
        plain = msgspec.to_builtins({"adapter": adapter, "versions": versions, "served": serving})
        print(json.dumps(plain))
        return
    out.print(
        f"{name}: base {adapter.base}, rank {adapter.rank}, current {adapter.current or '-'}",
        highlight=False,
    )
    table = Table("version", "parent", "Q", "held-out", "session", "", box=None, pad_edge=False)
    for v in versions:
        mark = "current" if v.version == adapter.current else "" if v.promoted else "not promoted"
        loss = "" if v.heldout_ce is None else f"{v.heldout_ce:.4f}"
        table.add_row(v.version, v.parent, f"{v.quality:.3f}", loss, v.session, mark)
    out.print(table)
    for replica, version in sorted(serving.items()):
        out.print(f"{replica} serves {version}", highlight=False)


@app.command()
def rollback(
    name: Name,
    to: Annotated[str, typer.Option(help="Version; none: the current one's parent")] = "",
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Make an earlier version current, on all replicas, with its quality."""

    async def back(registry: AdapterRegistry) -> AdapterVersion:
        entry = await registry.rollback(name, to or None, why="collm adapters rollback")
        await announce(registry, name, entry)
        return entry

    entry = _with(redis, data_dir, back)
    out.print(f"{name}: {entry.version} is current (Q {entry.quality:.3f})", highlight=False)


@app.command()
def export(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Folder to make, in PEFT's format")],
    version: Annotated[str, typer.Option(help="Version; none: the current one")] = "",
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Copy a version's PEFT folder, for use elsewhere."""

    async def find(registry: AdapterRegistry) -> AdapterVersion:
        if version:
            return await registry.version(name, version)
        current = await registry.current(name)
        if current is None:
            raise Unknown(f"adapter {name!r} has no version")
        return current

    entry = _with(redis, data_dir, find)
    if folder.exists():
        fail(f"{folder} exists already")
    try:
        shutil.copytree(entry.path, folder)
    except OSError as e:
        fail(f"{entry.path}: {e.strerror or e}")
    out.print(f"{name} {entry.version} -> {folder}", highlight=False)


@app.command()
def options(
    name: Name,
    values: Annotated[list[str], typer.Argument(help="OPTION=VALUE, such as strategy=ffa")],
    model: Annotated[str, typer.Option(help="Base model of an adapter that is new")] = "",
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """How sessions train this adapter, where it differs from the coordinator's settings."""
    from services.coordinator.settings import BadOptions, CoordinatorSettings

    chosen: dict[str, str | int | float] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals:
            fail(f"{value!r}: OPTION=VALUE expected")
        chosen[key] = text
    try:
        resolved = CoordinatorSettings().options(chosen)
    except BadOptions as e:
        fail(str(e))

    async def write(registry: AdapterRegistry) -> None:
        adapter = await registry.get(name)
        if adapter is None and model:
            await registry.register(name, base=model, rank=resolved.rank, source="session")
        old = adapter.training if adapter is not None else {}
        await registry.set_training(name, {**old, **chosen})

    _with(redis, data_dir, write)


async def announce(registry: AdapterRegistry, name: str, entry: AdapterVersion) -> None:
    """Tell every replica that serves the adapter to take this version."""
    for replica in await replicas_serving(registry.redis, name):
        load = LoadAdapter(name=name, version=entry.version, path=entry.path)
        await send_command(registry.redis, names.control(replica), load)
        await registry.redis.hset(names.replica(replica), "q", str(entry.quality))


def _with(
    redis: str | None, data_dir: Path | None, work: Callable[[AdapterRegistry], Awaitable[T]]
) -> T:
    url, folder = redis_url(redis, data_dir), data_folder(data_dir)

    async def run() -> T:
        async with connect(url) as client:
            return await work(AdapterRegistry(client, folder))

    with redis_errors():
        try:
            return asyncio.run(run())
        except (Unknown, Conflict, BadName) as e:
            fail(str(e))
