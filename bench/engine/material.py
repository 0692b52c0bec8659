"""Prompts and adapters that the engines are measured with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.replica.engines.torch.backends import module_shapes
from services.replica.engines.torch.config import read_config
from shared import chat, training_data

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def questions(count: int) -> list[str]:
    """Made questions of mixed length."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rng = random.Random(0)
    made = []
    for _ in range(count):
        sums = [f"{rng.choice(words)} plus {rng.choice(words)}" for _ in range(rng.randint(1, 30))]
        made.append(f"Please tell me step by step: how much is {', and '.join(sums)}?")
    return made


def prompts(folder: Path, data: Path | None, count: int) -> list[list[int]]:
    """Token ids of ``count`` chats under the model's template: the file's first user turns, or
    made ones of mixed length (10 to 200 tokens) without a file."""
    tokenizer = chat.load(folder)
    asked = _from_file(data) if data else questions(count)
    return [
        list(tokenizer.prompt([{"role": "user", "content": asked[i % len(asked)]}]))
        for i in range(count)
    ]


def texts(folder: Path, data: Path | None, count: int) -> list[list[int]]:
    """Token ids of whole chats (question and answer), at most 256 tokens each."""
    tokenizer = chat.load(folder)
    if data is None:
        whole = questions(count)
    else:
        loaded = training_data.load(data).chats[:count]
        whole = ["\n".join(str(m["content"]) for m in c.messages) for c in loaded]
    return [tokenizer.encode(text)[:256] for text in whole]


def _from_file(path: Path) -> list[str]:
    chats = training_data.load(path).chats
    return [str(m["content"]) for c in chats for m in c.messages[:2] if m["role"] == "user"]


def write_adapters(folder: Path, root: Path, count: int, dtype: torch.dtype) -> list[str]:
    """Random adapters (r = 8 on q, k, v, o) in PEFT's format."""
    shapes = module_shapes(read_config(folder))
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        out = root / f"adapter-{i}"
        out.mkdir(parents=True)
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            if module.endswith(TARGETS):
                name = f"base_model.model.{module}"
                a = torch.randn(RANK, inputs, generator=generator) * inputs**-0.5
                b = torch.randn(outputs, RANK, generator=generator) * 0.02
                tensors[f"{name}.lora_A.weight"] = a.to(dtype)
                tensors[f"{name}.lora_B.weight"] = b.to(dtype)
        save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(folder),
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "target_modules": list(TARGETS),
            "bias": "none",
            "inference_mode": True,
        }
        (out / "adapter_config.json").write_text(json.dumps(config))
        made.append(str(out))
    return made
