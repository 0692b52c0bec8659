"""Where the running system is: what options, environment and ``collm up`` say, in this order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from pydantic import Field
from redis.exceptions import RedisError

from collm.console import fail
from shared.redis_client import TRANSIENT
from shared.settings import Settings, SettingsError, client_variable, from_environment

RedisOption = Annotated[
    str | None, typer.Option("--redis", metavar="URL", help="Redis of the system to look at")
]
DataOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Data folder of the `collm up` to look at")
]
UrlOption = Annotated[str | None, typer.Option("--url", help="Address of the gateway")]


class ClientSettings(Settings):
    """What commands that look at a running system read: section ``common`` alone."""

    section: ClassVar[str] = "common"
    redis_url: str = Field("", description="Empty: that of the `collm up` on this data folder")


def redis_url(option: str | None, data_dir: Path | None) -> str:
    """Redis of the running system; ends the command when none is known."""
    settings = _settings(data_dir)
    if option or settings.redis_url:
        return option or settings.redis_url
    return str(_facts(settings.data_dir, "--redis or COLLM_REDIS_URL")["redis"])


def known_redis_url(option: str | None, data_dir: Path | None) -> str | None:
    """Like ``redis_url``, but None when none is known."""
    settings = _settings(data_dir)
    if option or settings.redis_url or (settings.data_dir / "run" / "up.json").exists():
        return redis_url(option, data_dir)
    return None


def data_folder(option: Path | None) -> Path:
    """Data folder of the running system, absolute."""
    return _settings(option).data_dir.resolve()


def gateway_url(option: str | None, data_dir: Path | None) -> str:
    """Address of the gateway without a path; ends the command when none is known."""
    url = option or client_variable("COLLM_URL")
    if not url:
        url = str(_facts(_settings(data_dir).data_dir, "--url or COLLM_URL")["url"])
    return url.rstrip("/").removesuffix("/v1")


def api_key() -> str:
    """The key that clients send; a placeholder when none is set."""
    return client_variable("COLLM_API_KEY") or "none"


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn what can go wrong with Redis into one clear message."""
    try:
        yield
    except (*TRANSIENT, RedisError, ValueError) as e:
        fail(f"Redis: {e}")


def _settings(data_dir: Path | None) -> ClientSettings:
    try:
        return from_environment(ClientSettings, data_dir=data_dir)
    except SettingsError as e:
        fail(str(e))


def _facts(data: Path, otherwise: str) -> dict[str, object]:
    path = data / "run" / "up.json"
    try:
        facts: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        fail(
            f"no running system found ({path} does not exist); start `collm up` or give {otherwise}"
        )
    return facts
