"""Where a result comes from: command line, commit, date, machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def facts() -> dict[str, str | None]:
    """As plain JSON, for the result's file."""
    return {"command": command(), "commit": commit(), "date": date(), "machine": machine()}


def command() -> str:
    """This process's own command line, ready for a shell.

    Of absolute paths what says something elsewhere: inside the checkout from there, else the last
    part.
    """
    return shlex.join(_without_place(argument) for argument in sys.orig_argv)


def _without_place(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    if not os.path.isabs(value):
        return argument
    path = Path(value)
    kept = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return f"{name}{equals}{kept or value}"


def commit(root: Path = ROOT) -> str | None:
    """The commit of the checkout, with a note if files were changed since; None without one."""
    if not (root / ".git").exists():
        return None  # an installation; a checkout further up would be another project's
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head} and changes" if changed else head


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def date() -> str:
    """Now, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> str:
    """The processor, how many of its cores this process may use, the Python."""
    cores = len(os.sched_getaffinity(0))
    return f"{processor()}, {cores} cores, Python {platform.python_version()}"


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model as Linux names it."""
    try:
        for line in info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
