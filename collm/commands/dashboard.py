"""``collm dashboard``: the live page."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from collm.console import fail, tell
from collm.dashboard.settings import DashboardSettings
from collm.where import DataOption, RedisOption, data_folder, gateway_url, redis_url
from shared import logs
from shared.settings import SettingsError, from_environment


def register(app: typer.Typer) -> None:
    app.command()(dashboard)


def dashboard(
    host: Annotated[str | None, typer.Option(help="Address to serve on; there is no login")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the page; 0: any free one")] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A gateway, for goodput; may be given several times"),
    ] = None,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Replicas, goodput, queues, adapters, rounds and events on a live page; Ctrl-C ends."""
    if importlib.util.find_spec("nicegui") is None:
        fail("the dashboard needs NiceGUI: pip install 'collm[dashboard]'")
    try:
        settings = from_environment(
            DashboardSettings,
            host=host,
            port=port,
            gateways=tuple(gateway) if gateway else None,
            redis_url=redis_url(redis, data_dir),
            data_dir=data_dir,
        )
    except SettingsError as e:
        fail(str(e))
    if not settings.gateways and redis is None:
        settings = settings.model_copy(update={"gateways": _known_gateway(data_dir)})
    logs.setup("dashboard", settings.log_level, settings.log_format)
    # NiceGUI and what it brings take a second to import; no other command shall wait for it.
    from collm.dashboard.server import serve

    try:
        asyncio.run(serve(settings, lambda url: tell(f"dashboard on {url}  (Ctrl-C ends)")))
    except OSError as e:
        fail(f"{settings.host}:{settings.port}: {e.strerror or e}; choose another with --port")
    except ValueError as e:
        fail(str(e))
    except KeyboardInterrupt:
        return


def _known_gateway(data_dir: Path | None) -> tuple[str, ...]:
    """The gateway of the `collm up` on this data folder, if there is one."""
    if (data_folder(data_dir) / "run" / "up.json").exists():
        return (gateway_url(None, data_dir),)
    return ()
