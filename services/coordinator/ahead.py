"""What a session's first round needs is made ready when data arrives, not when a session opens.

Tokenising a client's data and attaching a LoRA take a second or more, which would otherwise lie
between an idle cluster and its first training step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from services.coordinator.context import Context
from services.coordinator.jobs import job_id
from services.coordinator.settings import BadOptions, TrainingOptions
from shared import adapter_files
from shared.rounds import PREPARE, Lora, PrepareJob

log = logging.getLogger(__name__)

STORED = b"data_stored"
WAIT = 60  # seconds after which the job is not worth running any more


async def prepare(context: Context, entry: str, fields: Mapping[bytes, bytes]) -> None:
    """Have the replica of a ``data_stored`` event make itself ready. Never raises for what a
    session would find as well: the session says it."""
    replica, adapter = fields[b"replica"].decode(), fields[b"adapter"].decode()
    record = await context.cluster.record(replica)
    if fields.get(b"ok") != b"1" or record is None:
        return
    try:
        known = await context.registry.get(adapter)
        options = context.settings.options(known.training if known else {})
        lora = await _shape(context, adapter, options, replica)
    except (BadOptions, adapter_files.BadFolder, adapter_files.BadName) as e:
        log.info("%s: nothing is prepared for %s: %s", replica, adapter, e)
        return
    job = PrepareJob(
        adapter=adapter,
        base=record.model,
        lora=lora,
        max_tokens=options.max_tokens,
        heldout_fraction=options.heldout_fraction,
        seed=options.seed,
    )
    name = job_id("prepare", replica, adapter, entry)
    await context.jobs.ensure(replica, name, PREPARE, job, context.settings.job_seconds, wait=WAIT)


async def _shape(context: Context, adapter: str, options: TrainingOptions, replica: str) -> Lora:
    """Of the adapter's current version, or of the one that a session would begin with."""
    lora = options.lora
    current = await context.registry.current(adapter)
    if current is not None:
        card = await asyncio.to_thread(adapter_files.read_card, Path(current.path))
        lora = Lora(rank=card.rank, lora_alpha=card.lora_alpha, target_modules=card.target_modules)
    rank = options.client_ranks.get(replica, lora.rank)
    return replace(lora, rank=rank, lora_alpha=lora.lora_alpha * rank / lora.rank)
