"""``collm top``: the cluster, live, in the terminal."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.live import Live

from collm.console import out
from collm.top import Watcher, render
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared.redis_client import connect


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then end")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Replicas, streams, adapters and events as they are now; Ctrl-C ends."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        try:
            asyncio.run(_run(url, interval, once))
        except KeyboardInterrupt:
            return


async def _run(url: str, interval: float, once: bool) -> None:
    async with connect(url) as redis:
        watcher = Watcher(redis)
        look = await watcher.look()
        if once:
            out.print(render(look, watcher))
            return
        with Live(render(look, watcher), console=out, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                live.update(render(await watcher.look(), watcher), refresh=True)
