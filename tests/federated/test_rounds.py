"""The structs of training jobs survive JSON, which is all that rq carries."""

from __future__ import annotations

import json

import pytest

from shared import rounds


def test_a_round_job_survives_json() -> None:
    job = rounds.RoundJob(
        session="s1",
        round=3,
        client="replica-1",
        adapter="chat",
        base="m",
        parent="r2",
        parent_path="/data/adapters/chat/r2",
        lora=rounds.Lora(rank=4),
        micro_batches=(0, 4, 8),
        privacy=rounds.Privacy(clip=1.0, noise_multiplier=0.5),
    )
    text = json.dumps(rounds.to_json(job))
    assert rounds.from_json(json.loads(text), rounds.RoundJob) == job


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(rounds.BadJob, match="RoundResult"):
        rounds.from_json({"session": "s"}, rounds.RoundResult)
    with pytest.raises(rounds.BadJob, match="ce"):
        rounds.from_json({"client": "r", "ce": "low", "tokens": 1}, rounds.EvaluateResult)
