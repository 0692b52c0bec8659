"""From "start training" to the first step: in a running replica, and with a load of one's own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.sharing import memory
from bench.sharing.rig import ADAPTER, MODEL, rig
from shared import rounds
from shared.rounds import Lora, PrepareJob, PrepareResult, RoundResult


def measure(folder: Path, scratch: Path, lines: Sequence[str], repeats: int) -> dict[str, Any]:
    """Seconds, medians of ``repeats`` but for the separate load, which is one.

    ``shared``: from putting a round's job into the queue of a real replica until its first
    micro-step begins. Its training process has held the model since the replica's start, as that
    costs no memory, and prepared itself when the data came, as the coordinator asks it to;
    ``prepare`` is how long that took. ``separate``: ``from_pretrained`` of the same model from the
    page cache in a process that has its imports done, until it could begin a step;
    ``separate_process``: the same with the start of that process and its imports.
    """
    with rig(folder) as r:
        r.add_data(lines)
        parent = r.first_version()
        ahead = PrepareJob(adapter=ADAPTER, base=MODEL, lora=Lora())
        prepared: PrepareResult = r.result(r.job(rounds.PREPARE, ahead), PrepareResult)
        waits = []
        for number in range(1, repeats + 1):
            told = r.now()
            job = r.round(
                parent,
                round=number,
                steps=1,
                accumulation=1,
                micro_batches=(1,),
                heldout_before=1.0,
                judged=True,
            )
            result: RoundResult = r.result(job, RoundResult)
            waits.append(result.first_step - told)
    apart = scratch / "start"
    apart.mkdir()
    separate = memory.pair(folder, apart, "pretrained")
    return {
        "shared": statistics.median(waits),
        "shared_worst": max(waits),
        "prepare": prepared.seconds,
        "separate": separate.ready,
        "separate_process": separate.spawned,
    }
