"""``collm models``: what is in the model cache, and how it gets there."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from collm import models
from collm.console import fail, out, tell


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Models in the cache.", no_args_is_help=True)
    group.command("pull")(pull)
    group.command("list")(list_)
    app.add_typer(group, name="models")


def pull(
    name: Annotated[
        str, typer.Argument(help="Hub id, GGUF file, local folder, or the default model's name")
    ] = models.DEFAULT_NAME,
) -> None:
    """Fetch and convert a model once; prints the folder."""
    try:
        model = models.resolve(name, tell)
    except models.ModelError as e:
        fail(str(e))
    print(model.path)


def list_(as_json: Annotated[bool, typer.Option("--json", help="One JSON line")] = False) -> None:
    """The models that are ready to be served."""
    found = models.cached()
    if as_json:
        rows = [{"name": m.name, "path": str(m.path), "bytes": m.size} for m in found]
        print(json.dumps(rows))
        return
    table = Table("name", "MB", "from", "folder")
    for m in found:
        table.add_row(m.name, f"{m.size / 1e6:.0f}", m.origin, str(m.path))
    out.print(table if found else f"no models in {models.cache_folder()}; `collm models pull`")
