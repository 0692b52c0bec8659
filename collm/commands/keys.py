"""``collm keys``: make, list and revoke the API keys of a gateway."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from collm.console import fail, out
from shared import api_keys
from shared.settings import Settings, SettingsError, from_environment

Option = typer.Option
FileOption = Annotated[
    Path | None, Option("--file", help="Keys file; default: COLLM_API_KEYS_FILE")
]

keys = typer.Typer(no_args_is_help=True, help="API keys of the gateway.")


def register(app: typer.Typer) -> None:
    app.add_typer(keys, name="keys")


def _file(named: Path | None) -> Path:
    if named is not None:
        return named
    try:
        path = from_environment(Settings).api_keys_file
    except SettingsError as e:
        fail(str(e))
    if path is None:
        fail("no keys file: give --file or set COLLM_API_KEYS_FILE")
    return path


@keys.command()
def create(
    tenant: Annotated[str, Option(help="Owner of the key; sees only what is its own")],
    admin: Annotated[bool, Option("--admin", help="May load adapters and see everything")] = False,
    note: Annotated[str, Option(help="For your own memory")] = "",
    file: FileOption = None,
) -> None:
    """Make a key. It is shown once and stored nowhere: the file keeps its hash."""
    try:
        entry, secret = api_keys.create(_file(file), tenant, "admin" if admin else "user", note)
    except api_keys.KeysError as e:
        fail(str(e))
    out.print(f"{entry.id} ({entry.role} of {entry.tenant}):", highlight=False)
    print(secret)


@keys.command("list")
def show(file: FileOption = None) -> None:
    """All keys, without the keys."""
    try:
        found = api_keys.read(_file(file)).keys
    except api_keys.KeysError as e:
        fail(str(e))
    for key in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created))
        out.print(f"{key.id}  {key.tenant}  {key.role}  {made}  {key.note}", highlight=False)


@keys.command()
def revoke(key_id: str, file: FileOption = None) -> None:
    """Remove a key; running gateways refuse it within a second."""
    try:
        key = api_keys.revoke(_file(file), key_id)
    except api_keys.KeysError as e:
        fail(str(e))
    out.print(f"{key.id} of {key.tenant} is revoked", highlight=False)
