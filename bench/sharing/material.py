"""Models and chats that the parts measure with."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.replica.training.data import Encoded, encode
from shared import chat, training_data

# Shape of a Llama with 1.1e9 parameters (GQA 32/8), bf16: 2.2 GB.
BILLION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 17,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def billion(folder: Path, tokenizer_of: Path) -> Path:
    """A random Llama of more than 1e9 parameters, with another model's tokenizer."""
    folder.mkdir(parents=True)
    base = json.loads((tokenizer_of / "config.json").read_text())
    config = {**BILLION, **{k: base[k] for k in ("vocab_size", "bos_token_id", "eos_token_id")}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (tokenizer_of / name).exists():
            (folder / name).write_bytes((tokenizer_of / name).read_bytes())
    torch.manual_seed(0)
    save_file(_random_llama(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_llama(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    out = {"model.embed_tokens.weight": weight(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            out[f"{layer}.self_attn.{name}.weight"] = weight(rows, hidden)
        out[f"{layer}.self_attn.o_proj.weight"] = weight(hidden, q)
        out[f"{layer}.mlp.gate_proj.weight"] = weight(inner, hidden)
        out[f"{layer}.mlp.up_proj.weight"] = weight(inner, hidden)
        out[f"{layer}.mlp.down_proj.weight"] = weight(hidden, inner)
        out[f"{layer}.input_layernorm.weight"] = ones()
        out[f"{layer}.post_attention_layernorm.weight"] = ones()
    out["model.norm.weight"] = ones()
    return out


def lines(data: Path | None, count: int = 1000) -> list[str]:
    """Chats as JSON Lines: the file's, or made ones (small sums in words) without a file."""
    if data is not None:
        loaded = training_data.load(data).chats[:count]
        return [json.dumps({"messages": list(c.messages)}) for c in loaded]
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rng = random.Random(0)
    made = []
    for _ in range(count):
        numbers = [rng.randrange(10) for _ in range(3)]
        asked = f"Add {', '.join(words[n] for n in numbers)} and tell me how."
        told = " plus ".join(words[n] for n in numbers)
        answer = f"We add step by step: {told} equals {sum(numbers)}."
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        made.append(json.dumps({"messages": messages}))
    return made


def alike(chats: list[str], folder: Path, count: int = 64) -> list[str]:
    """Those whose length in tokens is closest to the median's: micro-steps that compare."""
    tokenizer = chat.load(folder)
    sized = sorted((len(tokenizer.encode(text, add_special_tokens=False)), text) for text in chats)
    first = max(0, (len(sized) - count) // 2)
    return [text for _, text in sized[first : first + count]]


def split(chats: list[str], scratch: Path) -> training_data.Split:
    """The paper's division of the chats: 70 % train, 30 % asked."""
    path = scratch / "chats.jsonl"
    path.write_text("\n".join(chats))
    return training_data.split(training_data.load(path).chats, 0.3)


def examples(chats: list[str], folder: Path, scratch: Path, limit: int = 256) -> Encoded:
    """The training part, tokenised."""
    return encode(split(chats, scratch).train, chat.load(folder), limit, "chats")
