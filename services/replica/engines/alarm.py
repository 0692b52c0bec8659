"""Waking at a precise moment. Event loops round their timers to a millisecond, which is too
coarse for emulated steps of a few milliseconds; a Linux timerfd is not."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

_MONOTONIC = 1
_ABSOLUTE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Spec(ctypes.Structure):
    """struct itimerspec: interval and first expiry, seconds and nanoseconds each."""

    _fields_ = [(n, ctypes.c_long) for n in ("every_s", "every_ns", "first_s", "first_ns")]


class Alarm:
    """One alarm clock, for one waiter at a time. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        """Raises OSError where there is no timerfd."""
        self._file = _LIBC.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        self._rung: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def until(self, moment: float) -> None:
        """Return at ``moment``, at once if it has passed."""
        if moment <= time.monotonic():
            await asyncio.sleep(0)
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._file, self._ring)
        seconds = int(moment)
        spec = _Spec(0, 0, seconds, max(1, int((moment - seconds) * 1e9)))
        self._rung = self._loop.create_future()
        _LIBC.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(spec), None)
        await self._rung

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return  # set anew in the meantime
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._file)
        os.close(self._file)
