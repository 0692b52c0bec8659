"""What every command says and how: results on stdout, talk and errors on stderr."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True, highlight=False)


def tell(line: str) -> None:
    """A line of progress for the person at the terminal."""
    err.print(line, markup=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one clear message."""
    err.print(f"collm: {message}", markup=False, soft_wrap=True, style="red")
    raise typer.Exit(code)
