"""Learning while serving: quality of answers over time, shared, separate and without training.

One run serves held-out questions while the replica trains. "sharing" scores each answer under
the version that served it; "separate" is the same training published only at its end; "none"
keeps the first version. Scoring happens after the run (paper, figures 3 and 12a).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.sharing.interference import FOREVER
from bench.sharing.rig import ADAPTER, Rig, until
from services.replica.training.scoring import Scorer
from shared import chat
from shared.rounds import RoundResult
from shared.training_data import Chat

BINS = 10


def run(
    rig: Rig, parent: str, asked: Sequence[Chat], *, seconds: float, B: int, accumulation: int
) -> dict[str, Any]:
    """Serve one question after another while a round trains for ``seconds``; score afterwards."""
    tokenizer = chat.load(rig.folder)
    stops = sorted(tokenizer.eos_ids)
    job = rig.round(
        parent,
        steps=FOREVER,
        deadline=rig.now() + seconds,
        micro_batches=(B,),
        accumulation=accumulation,
        heldout_fraction=0.3,
        max_tokens=256,
        learning_rate=1e-3,
        publish="on_improvement",
    )
    begun, served = time.monotonic(), list[tuple[float, int, str]]()
    number = 0
    while job.get_status(refresh=True) not in ("finished", "failed", "stopped"):
        question = asked[number % len(asked)]
        prompt = tokenizer.prompt([m for m in question.messages if m["role"] != "assistant"])
        ids = rig.submit([prompt], 24, adapter=ADAPTER, ignore_eos=False, stops=stops)
        answer = rig.wait(ids)[0]
        if answer.finish.startswith("failed"):
            raise RuntimeError(answer.finish)
        served.append((answer.sent - begun, number % len(asked), answer.version))
        number += 1
    result: RoundResult = rig.result(job, RoundResult)
    until(lambda: rig.block.training == 0, "end", 60)
    last = result.published[-1] if result.published else "r0"
    return _score(rig, asked, served, last, result)


def _score(
    rig: Rig,
    asked: Sequence[Chat],
    served: Sequence[tuple[float, int, str]],
    last: str,
    result: RoundResult,
) -> dict[str, Any]:
    scorer = Scorer(rig.folder, dtype="bfloat16")
    examples = [
        scorer.example(
            [m for m in c.messages if m["role"] != "assistant"],
            next(m["content"] for m in c.messages if m["role"] == "assistant"),
        )
        for c in asked
    ]
    folder = rig.home / "adapters" / ADAPTER
    versions = sorted({v for _, _, v in served} | {"r0", last})
    table: dict[str, list[float]] = {}
    for version in versions:
        scorer.use(Path(folder / version))
        table[version] = scorer.score(examples)
    ends = served[-1][0]
    curves: dict[str, list[float]] = {"sharing": [], "separate": [], "none": []}
    per_answer: dict[str, list[float]] = {"sharing": [], "separate": [], "none": []}
    for _, index, version in served:
        per_answer["sharing"].append(table[version][index])
        per_answer["separate"].append(table["r0"][index])
        per_answer["none"].append(table["r0"][index])
    edges = np.linspace(0.0, ends + 1e-6, BINS + 1)
    moments = np.array([t for t, _, _ in served])
    for low, high in itertools.pairwise(edges):
        inside = (moments >= low) & (moments < high)
        # The same questions for all three, so that only the version differs: all held-out ones
        # under the versions that were served in this part of the run.
        used = [v for (_, _, v), keep in zip(served, inside, strict=True) if keep]
        values = [float(np.mean(table[v])) for v in used]
        curves["sharing"].append(float(np.mean(values)) if values else float("nan"))
        curves["separate"].append(float(np.mean(table["r0"])))
        curves["none"].append(float(np.mean(table["r0"])))
    curves["sharing"].append(float(np.mean(table[last])))
    curves["separate"].append(float(np.mean(table[last])))
    curves["none"].append(float(np.mean(table["r0"])))
    return {
        "ce": curves,
        "per_answer": per_answer,
        "seconds": ends,
        "answers": len(served),
        "versions": len(versions),
        "steps": result.steps,
        "questions": len(asked),
    }
