"""T_infer of one replica over a grid of (b, B): what the coordinator's fit has to predict.

One replica alone on the machine, as in the paper's Fig. 9: beside others its steps would also
be theirs. Yielding is off, or serving would hardly feel training.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.sharing.interference import trained
from bench.sharing.rig import Rig, rig, until
from shared.messages import StepSample

PROMPT = 64  # tokens
FOREVER = 1_000_000  # optimiser steps, and more tokens than a cell takes


def grid(
    folder: Path,
    data: Path,
    bs: Sequence[int],
    Bs: Sequence[int],
    seconds: float,
    max_tokens: int,
    say: Callable[[str], None],
) -> list[StepSample]:
    """Samples of decode steps at every pair, ``seconds`` each."""
    found: list[StepSample] = []
    with rig(folder, training={"yielding": "false"}, b_max=max(bs)) as running:
        running.add_data(data.read_text(encoding="utf-8").splitlines())
        parent = running.first_version()
        for B in Bs:
            job = None
            if B:
                job = running.round(
                    parent,
                    steps=FOREVER,
                    micro_batches=(B,),
                    accumulation=1,
                    max_tokens=max_tokens,
                    evaluate_share=1e-9,
                )
                trained(running, 1)
            for b in bs:
                cell = _cell(running, b, seconds)
                found += cell
                say(f"b = {b}, B = {B}: {len(cell)} samples")
            if job is not None:
                running.stop(job)
    return found


def _cell(running: Rig, b: int, seconds: float) -> list[StepSample]:
    prompts = running.prompts(random.Random(b), b, PROMPT)
    ids = running.submit(prompts, 1500)
    block, answers = running.block, running.answers
    until(lambda: block.running == b and block.waiting == 0, "batch", 120)
    until(lambda: all(answers[i].tokens for i in ids), "prefill", 120)
    running.samples()
    time.sleep(seconds)  # the length of the measurement
    samples, _ = running.samples()
    running.cancel(ids)
    return [s for s in samples if s.b == b and s.prefill_tokens == 0]
