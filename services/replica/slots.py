"""Compute slots of a host: how many threads compute at once, over all processes.

Two replicas with a thread for every core each do not run at half speed: their threads wait for
one another at every barrier and both run tens of times slower. So whoever computes takes slots
first, one a thread: files in a folder, locked with ``flock``. The kernel frees the locks of a
process that dies, however it dies.

Serving goes first. Training never takes the first slot of a host with several, so a step always
finds one that no micro-step holds; and it must ask ``inference_waits`` between micro-steps (and
inside where that is cheap) and give its slots back when the answer is yes.

Serving processes queue at a gate, so that a replica which computes without pause cannot keep
the others out: whoever waits for a slot holds the gate, and the next step of the busy one queues
behind it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from types import TracebackType

_TIME = struct.Struct("<d")


class Lease:
    """Slots held; given back by ``release``, by leaving the block, or by the process's end."""

    def __init__(self, files: list[int]) -> None:
        self._files = files

    @property
    def count(self) -> int:
        """Threads that may compute."""
        return len(self._files)

    def join(self, other: Lease) -> None:
        """Take over what ``other`` holds; it is empty afterwards."""
        self._files += other._files
        other._files = []

    def release(self) -> None:
        """Give all back. May be called twice. The first slot goes last: waiters watch it."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Slots:
    """The slots in ``folder``, ``count`` of them. All users of a folder agree on the count."""

    def __init__(self, folder: Path, count: int) -> None:
        if count < 1:
            raise ValueError(f"compute slots: at least 1 expected, {count} given")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.count = count
        self._paths = [str(folder / f"slot-{i}") for i in range(count)]
        self._gate = str(folder / "gate")
        self._waiting = str(folder / "inference-waits")

    # ------------------------------------------------------------ serving

    def acquire(self, wanted: int) -> Lease:
        """Between 1 and ``wanted`` slots; blocks until one is free. For the serving side.

        Takes what is free at once rather than wait for all it wants.
        """
        gate = _open(self._gate)
        try:
            files = self._at_once(gate, wanted)
            if files is None:
                files = self._wait(gate, wanted)
        finally:
            os.close(gate)
        return Lease(files)

    def try_acquire(self, wanted: int) -> Lease | None:
        """Like ``acquire``, but None instead of waiting."""
        gate = _open(self._gate)
        try:
            files = self._at_once(gate, wanted)
        finally:
            os.close(gate)
        return None if files is None else Lease(files)

    def inference_waits(self) -> bool:
        """Whether a serving process stands without any slot: training must give way."""
        file = _open(self._waiting)
        try:
            return not _try_lock(file)
        finally:
            os.close(file)

    # ------------------------------------------------------------ training

    def try_acquire_training(self, wanted: int = 1, *, leave_first: bool = True) -> Lease | None:
        """Up to ``wanted`` slots for training; None when there are none or serving waits.

        Leaves the first slot to serving unless the host has only one. A caller whose replica
        has nothing to serve may take it too (``leave_first=False``), if it looks at
        ``inference_waits`` every few milliseconds.
        """
        if self.inference_waits():
            return None
        paths = self._paths[1:] if leave_first else [*self._paths[1:], self._paths[0]]
        files = self._take(paths or self._paths, wanted)
        return Lease(files) if files else None

    # ------------------------------------------------------------ parts

    def _at_once(self, gate: int, wanted: int) -> list[int] | None:
        if not _try_lock(gate):
            return None
        return self._take(self._paths, wanted) or None

    def _wait(self, gate: int, wanted: int) -> list[int]:
        """Wait our turn at the gate, then for the slot whose holder has had it longest."""
        waiting = _open(self._waiting)
        try:
            fcntl.flock(waiting, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_EX)
            if files := self._take(self._paths, wanted):
                return files
            path = min(self._paths, key=_held_since)
            first = _open(path)
            fcntl.flock(first, fcntl.LOCK_EX)
            _stamp(first)
            rest = [p for p in self._paths if p != path]
            return [first, *self._take(rest, wanted - 1)]
        finally:
            os.close(waiting)

    @staticmethod
    def _take(paths: list[str], wanted: int) -> list[int]:
        taken: list[int] = []
        for path in paths:
            if len(taken) >= wanted:
                break
            file = _open(path)
            if _try_lock(file):
                _stamp(file)
                taken.append(file)
            else:
                os.close(file)
        return taken


def _open(path: str) -> int:
    # A lock belongs to the open file, so every lease opens its own.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stamp(file: int) -> None:
    os.pwrite(file, _TIME.pack(time.monotonic()), 0)


def _held_since(path: str) -> float:
    """When the slot was last taken; only a hint for choosing which to wait for."""
    file = _open(path)
    try:
        raw = os.pread(file, _TIME.size, 0)
    finally:
        os.close(file)
    return float(_TIME.unpack(raw)[0]) if len(raw) == _TIME.size else 0.0
