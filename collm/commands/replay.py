"""``collm replay``: the load generator under the system's own command."""

from __future__ import annotations

import typer

from loadgen.cli import main


def register(app: typer.Typer) -> None:
    """Add ``collm replay``; every argument goes to the load generator as it is."""

    @app.command(
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Replay a trace or random arrivals against a running server and measure it "
        "(collm replay --help for all options).",
    )
    def replay(context: typer.Context) -> None:
        raise typer.Exit(main(context.args, prog="collm replay"))
