"""A client's update of a round: made private where asked, kept on disk, uploaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from redis import Redis
from safetensors.numpy import save as save_arrays
from torch import Tensor

from shared import adapter_files, blobs, privacy
from shared.rounds import RoundJob


@dataclass(frozen=True)
class Kept:
    """An update on disk, and what its upload took."""

    blob: str = ""  # "" = not uploaded
    seconds: float = 0.0
    bytes: int = 0


def path_of(home: Path, adapter: str, session: str, round_number: int) -> Path:
    """Where the update of a round lies until it is sent; an adapter keeps its last one only."""
    name = adapter_files.check_name(adapter)
    return home / "state" / "updates" / name / f"{session}.{round_number}.safetensors"


def keep(
    redis: Redis,
    home: Path,
    job: RoundJob,
    parent: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    *,
    upload: bool,
) -> Kept:
    """Write the update, upload it under the job's blob id if ``upload``. Raises BlobError."""
    before = {n: t.numpy() for n, t in parent.items()}
    update = {n: t.cpu().numpy() for n, t in trained.items()}
    if job.privacy is not None:
        frozen = frozenset(n for n in update if not any(f".lora_{p}." in n for p in job.train))
        update = privacy.clip_and_noise(
            before,
            update,
            clip=job.privacy.clip,
            noise_multiplier=job.privacy.noise_multiplier,
            rng=np.random.default_rng(),  # seeded by the system: must not be predictable
            frozen=frozen,
        )
    raw = save_arrays({n: np.ascontiguousarray(t) for n, t in update.items()})
    path = path_of(home, job.adapter, job.session, job.round)
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.iterdir():
        old.unlink()
    path.write_bytes(raw)
    if not upload:
        return Kept()
    begun = time.monotonic()
    blobs.put_sync(redis, job.blob, raw)
    return Kept(job.blob, time.monotonic() - begun, len(raw))
