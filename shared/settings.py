"""Configuration: one frozen model a service, from ``collm.yaml`` and ``COLLM_*``.

``collm.yaml`` has a section a service and a section ``common``; the environment wins over the
file: ``COLLM_REDIS_URL`` (common), ``COLLM_GATEWAY_PORT`` (section ``gateway``), nested values as
JSON. An unknown key or a bad value stops the start with a message that names it. The
environment is read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import orjson
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

SECTIONS = (
    "common",
    "gateway",
    "dispatcher",
    "launcher",
    "coordinator",
    "replica",
    "training",
    "up",
    "dashboard",
)
# COLLM_* variables that are not settings of a section.
OTHER_VARIABLES = frozenset({"COLLM_CONFIG", "COLLM_API_KEY", "COLLM_URL"})


class SettingsError(ValueError):
    """A setting is unknown or bad; the message names the key, where it came from and why."""


class Settings(BaseModel):
    """Base of every service's settings; subclasses name their ``section``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    section: ClassVar[str] = "common"

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis, Sentinel or TLS URL")
    redis_password_file: Path | None = Field(
        None, description="File whose first line is the password of redis_url"
    )
    data_dir: Path = Field(
        Path("data"), description="Folder for models, adapters, training data, logs"
    )
    api_keys_file: Path | None = Field(
        None, description="Keys that the gateway accepts; none: loopback only, everybody is admin"
    )
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    log_format: str = Field("text", pattern="^(text|json)$")

    @field_validator("api_keys_file", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        """A variable that a compose file passes on although nobody has set it is empty."""
        return None if value == "" else value

    @model_validator(mode="before")
    @classmethod
    def _read_password(cls, values: Any) -> Any:
        """Put the password into the URL, so that neither file nor environment shows it."""
        if not isinstance(values, dict) or not values.get("redis_password_file"):
            return values
        path = Path(values["redis_password_file"])
        try:
            password = path.read_text(encoding="utf-8").splitlines()[0].strip()
        except (OSError, UnicodeDecodeError, IndexError) as e:
            raise ValueError(f"redis_password_file: {path} holds no password ({e})") from e
        url = values.get("redis_url") or cls.model_fields["redis_url"].default
        return {**values, "redis_url": with_password(str(url), password)}


def with_password(url: str, password: str) -> str:
    """``url`` with this password, unless it has one of its own."""
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    if ":" in user:
        return url
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{hosts}"))


S = TypeVar("S", bound=Settings)


def load(cls: type[S], environ: Mapping[str, str], **overrides: Any) -> S:
    """Settings of class ``cls`` from the file named by ``COLLM_CONFIG`` (default collm.yaml).

    Order, last wins: ``common`` of the file, the section of the file, ``COLLM_X``,
    ``COLLM_<SECTION>_X``, ``overrides`` (command line). Raises SettingsError.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    path = Path(environ.get("COLLM_CONFIG", "collm.yaml"))
    if "COLLM_CONFIG" in environ or path.exists():
        for section in ("common", cls.section):
            for key, value in _read(path).get(section, {}).items():
                values[key], origin[key] = value, f"{path}: {section}.{key}"
    for key, (value, name) in _environment(cls, environ).items():
        values[key], origin[key] = value, name
    for key, value in overrides.items():
        if value is not None:
            values[key], origin[key] = value, f"--{key.replace('_', '-')}"
    try:
        return cls.model_validate(values)
    except ValidationError as e:
        lines = []
        for error in e.errors():
            key = str(error["loc"][0]) if error["loc"] else ""
            where = ".".join(str(part) for part in error["loc"])
            lines.append(f"{origin.get(key, cls.section)}: {where}: {error['msg']}")
        raise SettingsError("bad setting:\n  " + "\n  ".join(lines)) from e


def from_environment(cls: type[S], **overrides: Any) -> S:
    """``load`` with this process's environment."""
    return load(cls, os.environ, **overrides)


def client_key() -> str | None:
    """The key that this project's own clients send: COLLM_API_KEY, else OPENAI_API_KEY."""
    return client_variable("COLLM_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def user_cache() -> Path:
    """Folder for what can be fetched again: ``$XDG_CACHE_HOME/collm`` or ``~/.cache/collm``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "collm"


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``, for a child process."""
    return {**os.environ, **changes}


def telemetry_variable(name: str) -> str | None:
    """One of OpenTelemetry's standard variables (``OTEL_*``); None when unset or empty."""
    assert name.startswith("OTEL_"), name
    return os.environ.get(name) or None


def client_variable(name: str) -> str | None:
    """A variable of client commands (one of ``OTHER_VARIABLES``); None when unset or empty."""
    assert name in OTHER_VARIABLES, name
    return os.environ.get(name) or None


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError as e:
        raise SettingsError(f"{path}: no such file (named by COLLM_CONFIG)") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise SettingsError(f"{path}: not YAML: {e}") from e
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: a mapping of sections expected ({', '.join(SECTIONS)})")
    for section, values in content.items():
        if section not in SECTIONS:
            raise SettingsError(
                f"{path}: unknown section {section!r}; known: {', '.join(SECTIONS)}"
            )
        if values is not None and not isinstance(values, dict):
            raise SettingsError(f"{path}: section {section!r} must be a mapping")
    return {section: values or {} for section, values in content.items()}


def _environment(cls: type[Settings], environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Field -> (value, variable). An unknown COLLM_ variable of ours is an error."""
    common = {f"COLLM_{field.upper()}": field for field in Settings.model_fields}
    own = {f"COLLM_{cls.section.upper()}_{f.upper()}": f for f in cls.model_fields}
    others = tuple(f"COLLM_{s.upper()}_" for s in SECTIONS if s != cls.section)
    found: dict[str, tuple[Any, str]] = {}
    for name in sorted(environ, key=lambda n: (n in own, n)):
        if not name.startswith("COLLM_") or name in OTHER_VARIABLES:
            continue
        field = common.get(name) or own.get(name)
        if field is not None:
            found[field] = (_value(cls, field, environ[name], name), name)
        elif not name.startswith(others):
            raise SettingsError(f"unknown variable {name}; known: {', '.join({**common, **own})}")
    return found


def _value(cls: type[Settings], field: str, text: str, name: str) -> Any:
    """Text as it is for plain fields; JSON where the field is a list, mapping or model."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as e:
        raise SettingsError(f"{name}: not JSON: {e}") from e
