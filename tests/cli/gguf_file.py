"""A tiny Llama as a GGUF file, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

from bench.engine.gguf_file import gguf_name
from tests import tiny

PROMPT = "a12"
HIDDEN, FEED, LAYERS, HEADS, KV, DIM = 64, 128, 2, 4, 2, 16


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Write the file; returns the tensors that the converted checkpoint must hold."""
    writer = gguf.GGUFWriter(path, "llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*tiny.SPECIAL, *alphabet, "12"]
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_dimension_count(DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    expected = _tensors(len(tokens))
    for name, value in expected.items():
        writer.add_tensor(gguf_name(name), _as_stored(name, value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _tensors(vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    found: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": random(vocabulary, HIDDEN),
        "model.norm.weight": random(HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV * DIM, HIDDEN),
        "self_attn.v_proj": (KV * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (FEED, HIDDEN),
        "mlp.up_proj": (FEED, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}.weight"] = random(*shape)
    return found


def _as_stored(name: str, value: torch.Tensor) -> np.ndarray[Any, Any]:
    """GGUF keeps the rows of q and k in interleaved rotary order."""
    heads = HEADS if "q_proj" in name else KV if "k_proj" in name else 0
    if heads:
        rows, columns = value.shape
        value = value.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
        value = value.reshape(rows, columns)
    return np.ascontiguousarray(value.numpy())
