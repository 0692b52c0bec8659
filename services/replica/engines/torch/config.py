"""What the engine needs to know of a model, read from its config.json.

Llama 2 and 3.x, SmolLM2, Mistral, Qwen2/2.5 and Qwen3 are one family: RMSNorm, rotary
positions, grouped-query attention, gated MLP. They differ in the fields of ``ModelConfig``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.replica import checkpoint

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


class Unsupported(ValueError):
    """The fast path cannot run this model; the message says which field stands against it."""


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a model of the family."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    eps: float
    tied: bool
    qk_norm: bool  # Qwen3: RMSNorm over each head of q and k
    windows: tuple[int, ...]  # per layer: attention reaches back this many tokens; 0 = all
    rope: dict[str, Any]

    @property
    def group(self) -> int:
        """Query heads a key-value head."""
        return self.heads // self.kv_heads

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the linear layers an adapter may target, in the engine's order."""
        return {
            "q_proj": (self.q_rows, self.hidden),
            "k_proj": (self.kv_rows, self.hidden),
            "v_proj": (self.kv_rows, self.hidden),
            "o_proj": (self.hidden, self.q_rows),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    def inverse_frequencies(self) -> Tensor:
        """fp32 [head_dim / 2]; Llama 3's scaling keeps short waves, stretches long ones."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        inverse = 1.0 / (float(self.rope["rope_theta"]) ** exponent)
        kind = self.rope["rope_type"]
        if kind == "linear":
            inverse = inverse / float(self.rope["factor"])
        elif kind == "llama3":
            inverse = _llama3(inverse, self.rope)
        return inverse


def _llama3(inverse: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's frequency scaling (Meta's reference code, apply_scaling)."""
    factor = float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    old = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > old / low, inverse / factor, between)
    return torch.where(wavelength < old / high, inverse, scaled)


def read_config(folder: Path) -> ModelConfig:
    """The model's config for the fast path. Raises Unsupported; WeightsError: no usable file."""
    raw = checkpoint.read_config(folder)
    kind = raw.get("model_type")
    if kind not in FAMILY:
        raise Unsupported(f"model_type {kind!r} is none of {', '.join(FAMILY)}")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise Unsupported(f"{field} is set")
    if raw.get("hidden_act", "silu") != "silu":
        raise Unsupported(f"hidden_act {raw['hidden_act']!r} is not silu")
    if raw.get("quantization_config"):
        raise Unsupported("quantization_config is set")
    heads = raw["num_attention_heads"]
    return ModelConfig(
        model_type=kind,
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocabulary=raw["vocab_size"],
        context=raw["max_position_embeddings"],
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        windows=_windows(raw, kind),
        rope=_rope(raw),
    )


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters from the old fields (rope_theta, rope_scaling) or the new one."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in ROPE_TYPES:
        raise Unsupported(f"rope_type {rope['rope_type']!r} is none of {', '.join(ROPE_TYPES)}")
    return rope


def _windows(raw: dict[str, Any], kind: str) -> tuple[int, ...]:
    """Sliding windows per layer: Mistral's in all layers, Qwen's where configured."""
    layers = int(raw["num_hidden_layers"])
    window = int(raw.get("sliding_window") or 0)
    if kind == "llama" or not window:
        return (0,) * layers
    if kind == "mistral":
        return (window,) * layers
    if not raw.get("use_sliding_window", False):
        return (0,) * layers
    types = raw.get("layer_types")
    if types:
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    first = int(raw.get("max_window_layers", layers))
    return tuple(window if i >= first else 0 for i in range(layers))
