"""A child process that is kept alive: its log, its restarts, its end.

The kernel kills the child when the runner dies, however it dies, so that nothing is left
behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from collm.parent import die_with_parent
from shared.settings import child_environment

STEADY_SECONDS = 60.0  # a process that lived this long starts over with short waits
LONGEST_WAIT = 10.0
BAD_SETTINGS = 2  # exit code with which every service refuses its settings

Tell = Callable[[str], None]


class GivenUp(RuntimeError):
    """A process died again and again; the message names its log."""


class Child:
    """One process, restarted when it dies until ``stop``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: dict[str, str],
        *,
        tell: Tell,
        restarts: int,
        started: Callable[[], None],
        may_leave: bool = False,
    ) -> None:
        """``may_leave``: an orderly end (code 0), as after a drain, is no death."""
        self.name, self.log = name, log
        self._command, self._environment = list(command), environment
        self._tell, self._restarts, self._started = tell, restarts, started
        self._process: asyncio.subprocess.Process | None = None
        self._may_leave = may_leave
        self._stopping = False
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """None while it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def deaths(self) -> int:
        """Deaths in a row that came soon after a start."""
        return self._deaths

    async def start(self) -> None:
        """Start the process; returns when it has a pid."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=child_environment(self._environment),
                start_new_session=True,  # Ctrl-C is for the runner, which stops us in order
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    async def keep(self) -> None:
        """Restart whenever it dies, waiting longer each time. Raises GivenUp.

        Returns when it was stopped, or has left in good order and may.
        """
        while True:
            assert self._process is not None, "not started"
            born = time.monotonic()
            code = await self._process.wait()
            if self._stopping:
                return
            if code == 0 and self._may_leave:
                self._tell(
                    f"{self.name} has drained and stays away; "
                    f"`collm undrain {self.name}` starts it again"
                )
                return
            if code == BAD_SETTINGS:  # another try would end the same way
                raise GivenUp(f"{self.name} refuses its settings:\n{self.tail()}")
            self._deaths = 1 if time.monotonic() - born > STEADY_SECONDS else self._deaths + 1
            if self._deaths > self._restarts:
                raise GivenUp(
                    f"{self.name} died {self._deaths} times in a row, last {_ending(code)}; "
                    f"its log: {self.log}\n{self.tail()}"
                )
            wait = min(LONGEST_WAIT, 0.25 * 2 ** (self._deaths - 1))
            self._tell(f"{self.name} died ({_ending(code)}); restart in {wait:.1f} s ({self.log})")
            await asyncio.sleep(wait)
            await self._start_again()

    async def revive(self) -> None:
        """Start it again after ``keep`` has returned or given up; its deaths are forgotten."""
        self._deaths = 0
        await self._start_again()

    async def _start_again(self) -> None:
        if not self._stopping:
            await self.start()
            self._started()

    async def stop(self, patience: float) -> None:
        """SIGTERM, then SIGKILL after ``patience`` seconds; returns when it is gone."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            self._tell(f"{self.name} did not stop within {patience:.0f} s; killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL now, to its whole session."""
        self._stopping = True
        if self.pid is not None:
            os.killpg(self.pid, signal.SIGKILL)

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as f:
            f.seek(max(0, self.log.stat().st_size - 8192))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
