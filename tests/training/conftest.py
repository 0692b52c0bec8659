"""A tiny base model on mapped weights, and examples for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.replica.training import data
from services.replica.training.model import LoraSpec, build_base
from services.replica.weights import FusedWeights, open_fused
from shared import chat
from shared.training_data import Chat

SPEC = LoraSpec(r=4, lora_alpha=8.0, target_modules=("q_proj", "v_proj"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> chat.ChatTokenizer:
    return chat.load(tiny_model)


@pytest.fixture
def weights(tiny_model: Path) -> FusedWeights:
    return open_fused(tiny_model, "float32")


@pytest.fixture
def base(tiny_model: Path, weights: FusedWeights) -> torch.nn.Module:
    return build_base(tiny_model, weights.views)


def make_chats(count: int) -> list[Chat]:
    return [
        Chat(
            (
                {"role": "user", "content": f"what is {i}"},
                {"role": "assistant", "content": f"{i} is {i * i}" + "!" * (i % 5)},
            ),
            i,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="session")
def examples(tokenizer: chat.ChatTokenizer) -> tuple[data.Example, ...]:
    return data.encode(make_chats(40), tokenizer, 256, "made").examples
