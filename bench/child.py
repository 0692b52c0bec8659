"""A benchmark as a process that can be ended: it stops what it started, and nothing stays.

``python -m bench.child MODULE ARGUMENTS…`` runs the module as ``python -m MODULE`` would, but a
SIGTERM leaves it like an exit, so that the systems and folders it opened are closed.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

GRACE = 90.0  # seconds for a benchmark to end its systems; a `collm up` takes up to 40


class TooLong(Exception):
    """The benchmark was ended because its time was up."""


def run(
    module: str, arguments: Sequence[str], seconds: float, out: Path, grace: float = GRACE
) -> int:
    """Run a benchmark, its stdout in the file ``out``; returns the exit status. Raises TooLong.

    However this is left, nothing of the benchmark's process group runs afterwards.
    """
    with out.open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.child", module, *arguments],
            stdout=stdout,
            start_new_session=True,  # a group of its own: it and what it started end together
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired as e:
        raise TooLong from e
    finally:
        _end(process, grace)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Ask the benchmark alone, which asks its children in their order; then kill what is left."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
    finally:  # also when somebody presses Ctrl-C again
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _leave(number: int, _: Any) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the cleaning up
    sys.exit(128 + number)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m bench.child MODULE [ARGUMENTS…]")
    signal.signal(signal.SIGTERM, _leave)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
