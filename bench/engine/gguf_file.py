"""The benchmark's model as a GGUF file for llama.cpp, in the dtype that all engines use.

llama.cpp's own converter wants its repository; for a Llama all it does is naming the tensors,
ordering the rows of q and k for its rotary positions and writing the sizes down. The vocabulary
is left out, as the benchmark speaks in token numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.replica.engines.torch.config import ModelConfig, read_config
from services.replica.weights import open_fused

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write(folder: Path, out: Path, dtype: torch.dtype) -> Path:
    """Write ``out``. Raises ValueError for architectures other than Llama's without scaling."""
    import gguf

    config = read_config(folder)
    if config.model_type != "llama" or config.rope["rope_type"] != "default":
        raise ValueError(f"{folder}: only a Llama without rope scaling is written as GGUF here")
    writer = gguf.GGUFWriter(str(out), "llama")
    _sizes(writer, config)
    for name, tensor in open_fused(folder, dtype).views.items():
        if name == "lm_head.weight" and config.tied:
            continue
        data = _ordered(name, tensor, config)
        if tensor.ndim == 1 or dtype == torch.float32:
            writer.add_tensor(gguf_name(name), data.float().numpy())
        else:
            raw = data.contiguous().view(torch.uint8).numpy().view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _sizes(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_vocab_size(config.vocabulary)
    writer.add_tokenizer_model("none")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of transformers' Llama."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.weight"


def _ordered(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """q and k with the two halves of a head's rotary pairs interleaved, as llama.cpp turns them."""
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows, columns = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)
