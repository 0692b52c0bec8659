"""NVIDIA's Multi-Process Service: whether it runs, and what it may be told for one process.

With MPS several processes compute on one GPU at the same time; without it they take turns. A
process reads its limits from the environment when it first uses CUDA (NVIDIA, Multi-Process
Service, environment variables). Written after that document, not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DEFAULT_FOLDER = "/tmp/nvidia-mps"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
BELOW_NORMAL = "1"


def folder(environ: Mapping[str, str]) -> Path:
    """Where daemon and clients meet; both must name the same one."""
    return Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_FOLDER)


def runs(environ: Mapping[str, str]) -> bool:
    """Whether a control daemon has opened its end there.

    One that was killed leaves its files; clients then compute without MPS and without limits.
    """
    return (folder(environ) / "control").exists()


def limits(environ: Mapping[str, str], percent: int) -> dict[str, str]:
    """Variables for a process that gives way: at most ``percent`` of the GPU's threads, below the
    others' priority. Empty without a daemon; a limit that is in ``environ`` already stays."""
    if not runs(environ):
        return {}
    wanted = {PERCENTAGE: str(percent), PRIORITY: BELOW_NORMAL}
    return {name: environ.get(name) or value for name, value in wanted.items()}
