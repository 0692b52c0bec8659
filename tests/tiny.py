"""Tiny random models, written to disk as real checkpoints: the unit tests' stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
VOCABULARY = 259  # 3 special + 256 bytes


def write_tokenizer(folder: Path, context: int = 512) -> Path:
    """A byte-level tokenizer (3 special tokens, then one token a byte) with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL[1],
                "eos_token": SPECIAL[2],
                "unk_token": SPECIAL[0],
                "pad_token": SPECIAL[0],
                "model_max_length": context,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return folder


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of a 2-layer Llama of width 64 (GQA 4/2)."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "torch_dtype": "float32",
    }
    return {**config, **changes}


def write_config(folder: Path, **changes: Any) -> Path:
    """Tokenizer and config only: all that the control plane and the emulated engine read."""
    config = llama_config(**changes)
    write_tokenizer(folder, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    )
    return folder


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A whole checkpoint with random weights (imports torch and transformers)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(folder, **changes)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, safe_serialization=True)
    return folder
