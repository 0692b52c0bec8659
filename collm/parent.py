"""Children that do not outlive their parent: the kernel signals them when it dies."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int) -> Callable[[], None]:
    """For ``preexec_fn``: have the kernel send the child this signal when we die.

    Linux ties it to the thread that forks, so fork from one that lives as long as the process.
    """
    parent = os.getpid()

    def arrange() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return arrange
