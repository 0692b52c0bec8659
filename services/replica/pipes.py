"""One pipe between the parent and a child: JSON messages, end of file when either side dies."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import orjson

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None) -> None:
    """Let the kernel kill this process when its parent dies, however it dies (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("PR_SET_PDEATHSIG: %s; the pipe's end will do", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        os._exit(1)  # it died before the call


def send(pipe: Connection, message: dict[str, Any]) -> bool:
    """False when the other side is gone; its end is noticed elsewhere."""
    try:
        pipe.send_bytes(orjson.dumps(message))
    except (BrokenPipeError, ConnectionResetError, OSError):
        return False
    return True


def drain(pipe: Connection, heard: Callable[[dict[str, Any]], None]) -> bool:
    """Hear all that lies in the pipe; False at its end."""
    try:
        while pipe.poll():
            heard(orjson.loads(pipe.recv_bytes()))
    except (EOFError, ConnectionResetError, OSError):
        return False
    return True


def listen(
    pipe: Connection, heard: Callable[[dict[str, Any]], None], ended: Callable[[], None]
) -> None:
    """Call ``heard`` for every message and ``ended`` once at the pipe's end, on this loop."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not drain(pipe, heard):
            loop.remove_reader(pipe.fileno())
            ended()

    loop.add_reader(pipe.fileno(), readable)
    # uvloop makes the descriptor non-blocking, and then a message whose end has not arrived yet,
    # or a full pipe, looks like an error. Messages are short and both sides read all the time.
    os.set_blocking(pipe.fileno(), True)
