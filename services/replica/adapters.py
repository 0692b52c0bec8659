"""Reading LoRA adapters in PEFT's format, strictly: what is not understood is refused.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. Every tensor must name
a linear layer of the model and fit it; an adapter that half applies would answer like the base
model and look well. Source: PEFT's LoraConfig and its state dict names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from services.replica.engines.base import AdapterError
from shared.adapter_files import CONFIG_FILE, MAX_RANK, TENSOR_FILE

# Settings of LoraConfig that change the arithmetic in a way the engine does not have.
REFUSED = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "use_bdlora",
    "alora_invocation_tokens",
)
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.\w+)?\.weight")


@dataclass(frozen=True)
class AdapterSpec:
    """The fields of LoraConfig that the arithmetic needs."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's matrices is multiplied by."""
        alpha = float(_by_pattern(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))


@dataclass(frozen=True)
class Lora:
    """One layer's change: y += scale * (x A^T) B^T. fp32 ``a`` [r, inputs], ``b`` [outputs, r]."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


Modules = dict[str, Lora]  # "model.layers.0.self_attn.q_proj" -> its change


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that ends the module's name, at a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_folder(folder: str | Path, shapes: Mapping[str, tuple[int, int]]) -> Modules:
    """The adapter in a PEFT folder, checked against the model's linear layers.

    ``shapes``: module name under transformers' names -> (outputs, inputs). Raises AdapterError.
    """
    folder = Path(folder)
    spec = read_spec(folder)
    path = folder / TENSOR_FILE
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        reason = "only a pickled file is there: save it with safetensors" if pickled else "missing"
        raise AdapterError(f"{path}: {reason}")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as e:
        raise AdapterError(f"{path}: damaged safetensors file: {e}") from e
    return read_tensors(tensors, spec, shapes, source=str(path))


def read_spec(folder: Path) -> AdapterSpec:
    """``adapter_config.json``. Raises AdapterError, naming the field at fault."""
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise AdapterError(f"{path}: cannot be read ({e.strerror}); give a PEFT folder") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise AdapterError(f"{path}: not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise AdapterError(f"{path}: a JSON object expected")
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {raw.get('peft_type')!r}, LORA expected")
    for name in REFUSED:
        if raw.get(name):
            raise AdapterError(f"{path}: {name} is set; only plain LoRA of linear layers is served")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias is {raw['bias']!r}; only 'none' is served")
    return _spec(raw, path)


def _spec(raw: Mapping[str, Any], path: Path) -> AdapterSpec:
    r, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(r, int) or not 1 <= r <= MAX_RANK:
        raise AdapterError(f"{path}: r is {r!r}, a whole number from 1 to {MAX_RANK} expected")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{path}: lora_alpha is {alpha!r}, a finite number expected")
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    for name, pattern in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(pattern, dict) or not all(
            isinstance(v, int | float) for v in pattern.values()
        ):
            raise AdapterError(f"{path}: {name} must map module names to numbers")
    return AdapterSpec(r, float(alpha), bool(raw.get("use_rslora")), ranks, alphas)


def module_of(name: str) -> tuple[str, str]:
    """(module, "A" or "B") of a tensor under PEFT's name. Raises AdapterError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise AdapterError(f"{name!r} names no LoRA matrix")
    return match["module"], match["part"]


def read_tensors(
    tensors: Mapping[str, Tensor],
    spec: AdapterSpec,
    shapes: Mapping[str, tuple[int, int]],
    *,
    source: str,
) -> Modules:
    """Tensors under PEFT's names -> the change of each module. Raises AdapterError."""
    parts: dict[str, dict[str, Tensor]] = {}
    unmatched = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in shapes:
            unmatched.append(name)
        else:
            parts.setdefault(match["module"], {})[match["part"]] = tensor
    if unmatched:
        raise AdapterError(
            f"{source}: {len(unmatched)} of {len(tensors)} tensors name no linear layer of this "
            f"model: {', '.join(sorted(unmatched)[:4])}"
        )
    if not parts:
        raise AdapterError(f"{source}: no tensors")
    return {m: _lora(m, p, spec, shapes[m], source) for m, p in sorted(parts.items())}


def _lora(
    module: str,
    parts: Mapping[str, Tensor],
    spec: AdapterSpec,
    shape: tuple[int, int],
    source: str,
) -> Lora:
    outputs, inputs = shape
    rank = spec.rank(module)
    if not 1 <= rank <= MAX_RANK:
        raise AdapterError(f"{source}: {module}: rank {rank} is not from 1 to {MAX_RANK}")
    for part, expected in (("A", (rank, inputs)), ("B", (outputs, rank))):
        name = f"{module}.lora_{part}.weight"
        tensor = parts.get(part)
        if tensor is None:
            raise AdapterError(f"{source}: {name} is missing")
        if tuple(tensor.shape) != expected:
            raise AdapterError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, {expected} expected"
            )
        if not tensor.is_floating_point():
            raise AdapterError(f"{source}: {name} is {tensor.dtype}, a floating type expected")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{source}: {name} holds NaN or infinite values")
    return Lora(parts["A"].float(), parts["B"].float(), spec.scale(module, rank))
