"""Which way updates travel: Redis, Gloo or NCCL.

Asked in two parts: whether a group is to meet at all before the clients train, because an update
is uploaded or kept at the end of that; and the group's backend when it is known who is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.records import ReplicaRecord


def choose_path(wanted: str, size: int, limit: int) -> str:
    """ "redis" or "group" for updates of ``size`` bytes.

    ``wanted`` is the setting; "auto" takes a process group from ``limit`` bytes on: a small update
    is through Redis before a group has met.
    """
    if wanted != "auto":
        return wanted
    return "group" if size >= limit else "redis"


def choose_backend(members: Sequence[ReplicaRecord]) -> str:
    """ "nccl" when every member has a GPU of its own, else "gloo".

    NCCL refuses two ranks on one GPU. Its UUID names a GPU; host and device would not do, because
    two containers that share a GPU have different host names and both call it cuda:0. A member
    that has not said where it computes counts as one without a GPU.
    """
    gpus = {r.gpu for r in members if r.device.startswith("cuda") and r.gpu}
    return "nccl" if len(members) > 1 and len(gpus) == len(members) else "gloo"
