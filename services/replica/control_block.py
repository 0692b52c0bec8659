"""The control block: what a replica's processes tell one another without a message.

One small file a replica, mapped by the parent, the inference and the training process. It
outlives each of them, so a restarted child finds the limits in force.

Layout: 8-byte fields, aligned, each group on cache lines of its own. Every field has exactly one
writer (the group's process). A store or load of an aligned 8-byte word is atomic on x86-64 and
AArch64, so a reader never sees half a value. There is no order between fields on weakly ordered
machines: no reader may conclude from one field that another has been written. Nothing here needs
that; values which belong together and must agree do not lie here.

Times are seconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from pathlib import Path
from typing import overload

_SIZE = 4096
_MAGIC = 0x434F4C4C4D424C32  # "COLLMBL2"
_LINE = 8  # fields of 8 bytes in a cache line


class BlockError(ValueError):
    """The file is no control block of this version; the message names it."""


class _Int:
    """An integer field at a fixed word of the block."""

    def __init__(self, word: int) -> None:
        self.word = word

    @overload
    def __get__(self, block: None, owner: type[ControlBlock]) -> _Int: ...

    @overload
    def __get__(self, block: ControlBlock, owner: type[ControlBlock]) -> int: ...

    def __get__(self, block: ControlBlock | None, owner: type[ControlBlock]) -> _Int | int:
        return self if block is None else block.ints[self.word]

    def __set__(self, block: ControlBlock, value: int) -> None:
        block.ints[self.word] = value


class _Float:
    """A floating-point field at a fixed word of the block."""

    def __init__(self, word: int) -> None:
        self.word = word

    @overload
    def __get__(self, block: None, owner: type[ControlBlock]) -> _Float: ...

    @overload
    def __get__(self, block: ControlBlock, owner: type[ControlBlock]) -> float: ...

    def __get__(self, block: ControlBlock | None, owner: type[ControlBlock]) -> _Float | float:
        return self if block is None else block.floats[self.word]

    def __set__(self, block: ControlBlock, value: float) -> None:
        block.floats[self.word] = value


class ControlBlock:
    """A mapped control block. ``create`` in the parent, ``open`` in the children."""

    magic = _Int(0)

    # Written by the inference process: what it does.
    progress_time = _Float(1 * _LINE)  # when the last turn began
    step_started = _Float(1 * _LINE + 1)  # when the step in progress began; 0 = none runs
    running = _Int(1 * _LINE + 2)  # requests decoding together
    waiting = _Int(1 * _LINE + 3)  # requests without KV memory yet
    slack = _Float(1 * _LINE + 4)  # seconds training may delay serving; inf = nobody waits
    busy_seconds = _Float(1 * _LINE + 5)  # seconds spent in steps since the block was made
    steps = _Int(1 * _LINE + 6)
    step_estimate = _Float(2 * _LINE)  # smoothed seconds of a step at the present load
    inference_pid = _Int(2 * _LINE + 1)
    b = _Int(2 * _LINE + 2)  # concurrency limit in force
    B = _Int(2 * _LINE + 3)  # training micro-batch in force; 0 = training rests
    pulse = _Float(2 * _LINE + 4)  # when its event loop last ran, steps or not
    slot_seconds = _Float(2 * _LINE + 5)  # compute slots times the seconds they were held

    # Written by the parent.
    stopping = _Int(4 * _LINE)  # 1 = the replica drains

    # Written by the training process.
    training = _Int(6 * _LINE)  # 1 = a job is running
    micro_started = _Float(6 * _LINE + 1)  # when the micro-step in progress began; 0 = none
    micro_samples = _Int(6 * _LINE + 2)  # samples of the micro-step in progress; 0 = none
    micro_steps = _Int(6 * _LINE + 3)  # micro-steps done since the block was made
    train_seconds = _Float(6 * _LINE + 4)  # seconds spent in them, waits excluded
    train_tokens = _Int(6 * _LINE + 5)
    micro_estimate = _Float(6 * _LINE + 6)  # smoothed seconds of a micro-step
    train_slot_seconds = _Float(6 * _LINE + 7)  # compute slots times the seconds they were held
    train_wait_seconds = _Float(7 * _LINE)  # at the gate, for whatever reason

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        self._view = memoryview(memory)
        self.ints = self._view.cast("q")
        self.floats = self._view.cast("d")

    @classmethod
    def create(cls, path: Path) -> ControlBlock:
        """A fresh block at ``path``; an older one there is replaced, not rewritten."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(bytes(_SIZE))
        os.replace(temporary, path)
        block = cls(path, _map(path))
        block.slack = math.inf
        block.progress_time = block.pulse = time.monotonic()
        block.magic = _MAGIC
        return block

    @classmethod
    def open(cls, path: Path) -> ControlBlock:
        """The block at ``path``. Raises BlockError if it is none, FileNotFoundError."""
        if path.stat().st_size != _SIZE:
            raise BlockError(f"{path}: {_SIZE} bytes expected; is it a control block?")
        block = cls(path, _map(path))
        if block.magic != _MAGIC:
            block.close()
            raise BlockError(f"{path}: not a control block of this version; restart the replica")
        return block

    def close(self) -> None:
        """Unmap. The file stays."""
        self.ints.release()
        self.floats.release()
        self._view.release()
        self._memory.close()

    # ------------------------------------------------------------ what readers ask

    def may_train(self) -> bool:
        """Whether the training process may do anything at all now."""
        return not self.stopping and self.B > 0

    def has_slack(self, seconds: float) -> bool:
        """Whether serving can be delayed by ``seconds`` and still keep its deadlines."""
        return self.slack >= seconds

    def stuck(self, now: float, *, silence: float, step_timeout: float) -> str | None:
        """Why the serving loop counts as hung at ``now``; None while it makes progress.

        Its event loop must run every ``silence`` seconds, a step may take ``step_timeout``, and
        between steps the loop must turn every ``silence`` seconds.
        """
        if now - self.pulse > silence:
            return f"inference process has not run for {now - self.pulse:.1f} s"
        started = self.step_started
        if started:
            running = now - started
            return f"a step has taken {running:.0f} s" if running > step_timeout else None
        if now - self.progress_time > silence:
            return f"serving loop has not turned for {now - self.progress_time:.1f} s"
        return None


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE)
