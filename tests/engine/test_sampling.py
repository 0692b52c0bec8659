"""Sampling: each setting's meaning, and the same text in any batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.replica.engines.torch.sampling import CANDIDATES, Row, choose, uniform
from shared.messages import Sampling
from tests.engine.helpers import load, prompts, request, run, tokens


def row(index: int = 0, seed: int = 1, **settings: Any) -> Row:
    prompt, output = settings.pop("prompt", []), settings.pop("output", [])
    return Row(Sampling(max_tokens=9, **settings), seed, index, prompt, output)


def draw(logits: Tensor, count: int = 4000, **settings: Any) -> Counter[int]:
    rows = [row(index=i, **settings) for i in range(count)]
    return Counter(choose(logits.repeat(count, 1), rows)[0])


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = draw(logits, temperature=0.7)
    expected = torch.softmax(logits / 0.7, -1)
    for token, p in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - p) < 0.03


@pytest.mark.parametrize("vocabulary", [50, CANDIDATES * 4])
def test_truncations_leave_exactly_the_tokens_they_should(vocabulary: int) -> None:
    logits = torch.full((vocabulary,), -9.0)
    logits[:5] = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log() + 20
    assert set(draw(logits, top_k=3)) == {0, 1, 2}
    assert set(draw(logits, top_p=0.7)) == {0, 1}
    assert set(draw(logits, top_p=0.71)) == {0, 1, 2}
    assert set(draw(logits, min_p=0.3)) == {0, 1, 2}
    assert set(draw(logits, top_k=3, top_p=0.8)) == {0, 1}, "top_p is a share of what top_k left"
    assert set(draw(logits, top_p=1e-9)) == {0}


def test_a_flat_distribution_is_cut_beyond_the_candidates() -> None:
    logits = torch.zeros(CANDIDATES * 4)
    kept = set(draw(logits, top_p=0.5, count=6000))
    assert len(kept) == CANDIDATES * 2


def test_penalties_move_logits_as_defined() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.0]])
    assert choose(logits.clone(), [row(temperature=0, repetition_penalty=1.1, prompt=[0])])[0] == [
        1
    ]
    assert choose(logits.clone(), [row(temperature=0, presence_penalty=0.2, prompt=[0])])[0] == [0]
    assert choose(logits.clone(), [row(temperature=0, presence_penalty=0.2, output=[0])])[0] == [1]
    twice = row(temperature=0, frequency_penalty=0.06, output=[0, 0])
    once = row(temperature=0, frequency_penalty=0.06, output=[0])
    assert choose(logits.repeat(2, 1), [twice, once])[0] == [1, 0]
    negative = torch.tensor([[-1.0, -1.05]])
    assert choose(negative, [row(temperature=0, repetition_penalty=1.2, prompt=[0])])[0] == [1]


def test_logprobs_are_the_models_own_whatever_the_sampling() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    want = torch.log_softmax(logits, -1)[0].tolist()
    tokens_, lines = choose(
        logits, [row(temperature=0, logprobs=2, presence_penalty=5, output=[0])]
    )
    assert tokens_ == [2]
    line = lines[0]
    assert line is not None
    assert line.logprob == pytest.approx(want[2])
    assert [t.token for t in line.top] == [0, 2]
    assert [t.logprob for t in line.top] == pytest.approx([want[0], want[2]])


def test_no_end_token_before_min_tokens() -> None:
    logits = torch.tensor([[5.0, 1.0]])
    early = row(temperature=0, min_tokens=3, stop_token_ids=(0,), index=2)
    late = row(temperature=0, min_tokens=3, stop_token_ids=(0,), index=3)
    assert choose(logits.repeat(2, 1), [early, late])[0] == [1, 0]


def test_uniform_numbers_are_uniform_and_belong_to_seed_and_index() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    numbers = uniform(seeds, np.zeros_like(seeds))
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.histogram(numbers, 10, (0, 1))[0].min() > 1800
    assert len(set(uniform(np.full(99, 5, np.uint64), np.arange(99, dtype=np.uint64)))) == 99
    assert (
        uniform(np.array([5], np.uint64), np.array([7], np.uint64))
        == uniform(np.array([1, 5], np.uint64), np.array([7, 7], np.uint64))[1]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_text_in_any_batch(tiny_model: Path, dtype: str) -> None:
    engine = load(tiny_model, dtype=dtype)
    settings = [
        Sampling(max_tokens=12, temperature=1.0, seed=4),
        Sampling(max_tokens=12, temperature=1.3, top_p=0.9, seed=4),
        Sampling(max_tokens=12, temperature=0.8, top_k=20, min_p=0.01, seed=9),
        Sampling(max_tokens=12, temperature=1.0, repetition_penalty=1.3, seed=9, logprobs=3),
    ]
    requests = [
        request(str(i), prompt, sampling=settings[i % 4])
        for i, prompt in enumerate(prompts(24, seed=6))
    ]
    together = tokens(run(engine, requests))
    for one in requests[:8]:
        assert tokens(run(engine, [one]))[one.id] == together[one.id]
    engine.close()


def test_min_tokens_and_logprobs_reach_the_output(tiny_model: Path) -> None:
    engine = load(tiny_model)
    free = tokens(run(engine, [request("a", [5, 6, 7], 8)]))["a"]
    sampling = Sampling(
        max_tokens=8, min_tokens=5, temperature=0.0, stop_token_ids=(free[1],), logprobs=2
    )
    parts = run(engine, [request("a", [5, 6, 7], sampling=sampling)])["a"]
    assert len(parts) >= 5
    assert free[1] not in [t for p in parts[:5] for t in p.tokens]
    assert all(len(p.logprobs) == 1 and len(p.logprobs[0].top) == 2 for p in parts)
    engine.close()
