"""The command line: one file a noun in ``collm/commands``, each with a ``register`` function."""

from __future__ import annotations

import importlib
import pkgutil

import typer

from collm import commands


def build() -> typer.Typer:
    """The application with every command file's commands."""
    app = typer.Typer(
        name="collm",
        help="Serve an LLM with many LoRA adapters and fine-tune it on idle replicas.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in sorted(m.name for m in pkgutil.iter_modules(commands.__path__)):
        if module.startswith("_"):
            continue
        importlib.import_module(f"{commands.__name__}.{module}").register(app)
    return app


def main() -> None:
    """Entry point of ``collm``."""
    build()(prog_name="collm")


if __name__ == "__main__":
    main()
