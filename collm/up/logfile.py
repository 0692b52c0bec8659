"""Logs of bounded length: what has grown too long moves aside, while it is being written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

LOG_BYTES = 32 << 20  # of a log; as much again is kept of what was before


def rotate(log: Path, limit: int = LOG_BYTES) -> bool:
    """Copy a log above ``limit`` bytes to ``<log>.1`` and empty it; whether that was needed.

    Its writer goes on at the new end, since it appends (as Redis does, too). A line written
    between copy and cut is lost. Raises OSError, when the disk is full for one.
    """
    try:
        if log.stat().st_size <= limit:
            return False
    except FileNotFoundError:
        return False
    shutil.copyfile(log, log.with_name(log.name + ".1"))
    os.truncate(log, 0)
    return True
