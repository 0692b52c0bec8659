"""Tiny random models, written to disk as real checkpoints: the unit tests' stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
    """A whole checkpoint with random weights, without torch and transformers: importing those
    takes a test process longer than most tests."""
    config = llama_config(**changes)
    write_config(folder, **changes)
    rng = np.random.default_rng(seed)
    spread = config["initializer_range"]
    tensors = {}
    for name, shape in _shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = np.ones(shape, np.float32)
        elif name.endswith("bias"):
            tensors[name] = np.zeros(shape, np.float32)
        else:
            tensors[name] = rng.normal(0.0, spread, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama, Mistral, Qwen2 or Qwen3 as transformers names and shapes them."""
    width, kind = config["hidden_size"], config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in _projections(config).items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if kind == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (width,)
        if kind == "qwen3":
            for norm in ("q_norm", "k_norm"):
                shapes[f"{prefix}.self_attn.{norm}.weight"] = (config["head_dim"],)
    return shapes


def _projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of one layer."""
    width, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, pairs = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (pairs, width),
        "self_attn.v_proj": (pairs, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (wide, width),
        "mlp.up_proj": (wide, width),
        "mlp.down_proj": (width, wide),
    }


def write_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int,
    r: int = 4,
    alpha: float = 8.0,
    spread: float = 0.3,
    targets: tuple[str, ...] = ("q_proj", "v_proj", "o_proj"),
) -> Path:
    """A LoRA adapter in PEFT's format; B is random and large, so that every answer changes."""
    config = json.loads((model / "config.json").read_text())
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in _projections(config).items():
            if name.rpartition(".")[2] in targets:
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                bound = 1.0 / np.sqrt(inputs)
                tensors[f"{prefix}.lora_A.weight"] = rng.uniform(-bound, bound, (r, inputs))
                tensors[f"{prefix}.lora_B.weight"] = rng.normal(0.0, spread, (outputs, r))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
