"""``collm doctor``: what is wrong with this machine or the running system, and how to mend it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer

from collm import doctor
from collm.console import out
from collm.where import DataOption, RedisOption, data_folder, known_redis_url

_STYLE = {doctor.Level.OK: "green", doctor.Level.NOTE: "yellow", doctor.Level.BAD: "red"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(run)


def run(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line")] = False,
    host: Annotated[str, typer.Option(help="Address the gateway would listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port the gateway would listen on")] = 8000,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Check the machine, and the running system if there is one. Exit code 1: something is bad."""
    url = known_redis_url(redis, data_dir)
    known = url is not None
    findings = list(doctor.machine(data_folder(data_dir), host, port, redis_known=known))
    if url is not None:
        findings += asyncio.run(doctor.system(url))
    if as_json:
        print(json.dumps([asdict(f) for f in findings]))
    else:
        for f in findings:
            _show(f)
        if url is None:
            out.print("no running system found; `collm up` starts one", style="dim")
    if any(f.level is doctor.Level.BAD for f in findings):
        raise typer.Exit(1)


def _show(finding: doctor.Finding) -> None:
    level = finding.level
    out.print(f"[{_STYLE[level]}]{level.value:>4}[/]  {finding.check:<18}", end="")
    out.print(finding.found, markup=False, highlight=False, soft_wrap=True)
    if finding.mend:
        out.print(f"{'':>24}-> {finding.mend}", markup=False, highlight=False, soft_wrap=True)
