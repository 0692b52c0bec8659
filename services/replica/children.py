"""A child process of the replica: started, heard, watched, started again within bounds."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil
from psutil import STATUS_STOPPED

from services.replica import pipes

log = logging.getLogger(__name__)

WINDOW = 600.0  # seconds in which deaths are counted
LONGEST_PAUSE = 10.0  # seconds before a new start


class GaveUp(RuntimeError):
    """The child died too often; the message says how often and how."""


def describe(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None:
        return "still runs"
    if exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else -exit_code
        hint = ", perhaps out of memory" if name == "SIGKILL" else ""
        return f"ended by {name}{hint}"
    return f"ended with exit code {exit_code}"


class Child:
    """One child. ``start`` again after it has ended; the pipe is a new one each time."""

    def __init__(
        self,
        name: str,
        target: Callable[[str, Connection], None],
        config_json: str,
        *,
        heard: Callable[[dict[str, Any]], None],
        restarts: int,
        nice: int = 0,
    ) -> None:
        self.name = name
        self._target, self._heard, self._nice = target, heard, nice
        self.config = config_json  # may be changed before the next start
        self._restarts = restarts
        self._deaths: deque[float] = deque()
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._ended = asyncio.Event()
        self._ended.set()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the last process; negative: the signal that ended it."""
        return None if self._process is None else self._process.exitcode

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def start(self) -> None:
        """Spawn it: a fresh interpreter that inherits nothing but the pipe."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run, args=(self._target, self.config, theirs, self._nice), name=self.name
        )
        process.start()
        theirs.close()
        self._process, self._pipe = process, ours
        self._ended.clear()
        asyncio.get_running_loop().add_reader(process.sentinel, self._reap, process)
        pipes.listen(ours, self._heard, lambda: None)
        log.info("%s: process %d started", self.name, process.pid)

    def _reap(self, process: SpawnProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        if self._pipe is not None and not self._pipe.closed:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            pipes.drain(self._pipe, self._heard)  # its last words
            self._pipe.close()
        self._ended.set()

    async def ended(self) -> str:
        """Wait for its end; returns how it ended."""
        await self._ended.wait()
        return describe(None if self._process is None else self._process.exitcode)

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it: it will not go on by itself."""
        try:
            return self.pid is not None and psutil.Process(self.pid).status() == STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def tell(self, message: dict[str, Any]) -> bool:
        """Send a message; False when it has ended."""
        return self._pipe is not None and not self._pipe.closed and pipes.send(self._pipe, message)

    def kill(self) -> None:
        """kill -9 (also ends a stopped process)."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    async def stop(self, seconds: float) -> None:
        """Ask it to stop, then kill it."""
        if not self.alive:
            return
        self.tell({"stop": True})
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            log.warning("%s did not stop within %.0f s and is killed", self.name, seconds)
            self.kill()
            await self._ended.wait()

    async def pause_before_restart(self, how: str) -> None:
        """Wait longer with each death. Raises GaveUp after too many in the window."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - WINDOW:
            self._deaths.popleft()
        if len(self._deaths) > self._restarts:
            raise GaveUp(
                f"{self.name} process {how}; it has died {len(self._deaths)} times within "
                f"{WINDOW / 60:.0f} minutes: see its log for the reason"
            )
        if len(self._deaths) > 1:
            await asyncio.sleep(min(LONGEST_PAUSE, 0.1 * 2 ** len(self._deaths)))


def _run(
    target: Callable[[str, Connection], None], config: str, pipe: Connection, nice: int
) -> None:
    """First code of the child."""
    parent = multiprocessing.parent_process()
    pipes.die_with_parent(None if parent is None else parent.pid)
    if nice:
        os.nice(nice)
    target(config, pipe)
