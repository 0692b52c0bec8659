"""On which port a process listens, as the kernel knows it: any free one was asked for."""

from __future__ import annotations

import psutil


def port_of(pid: int) -> int | None:
    """The lowest TCP port that the process listens on; None: none yet, or it is gone."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return None
    ports = [c.laddr.port for c in found if c.status == psutil.CONN_LISTEN]
    return min(ports, default=None)
