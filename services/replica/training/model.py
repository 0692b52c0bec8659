"""transformers' model on the shared base weights, with one trainable PEFT LoRA on top.

The model is built on the meta device and takes the mapped tensors as they are
(``load_state_dict(assign=True)``): nothing is copied and nothing of the base is trainable. PEFT
comes after the base, or its own weights would stay on meta.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.replica.training.data import IGNORED, MicroBatch

PREFIX = "base_model.model."


class ModelError(ValueError):
    """The model folder or the adapter does not fit; the message names the tensor."""


@dataclass(frozen=True)
class LoraSpec:
    """Shape of an adapter. Two adapters with equal specs exchange tensors."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    lora_dropout: float = 0.0

    def peft_config(self, base: str | None = None) -> LoraConfig:
        """``base``: what the saved adapter names as its base model."""
        return LoraConfig(
            r=self.r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=list(self.target_modules),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )


def build_base(folder: Path, views: Mapping[str, Tensor]) -> nn.Module:
    """A causal LM whose parameters are ``views`` themselves, frozen, in evaluation mode.

    Raises ModelError when the checkpoint lacks a tensor that the architecture wants.
    """
    config = AutoConfig.from_pretrained(folder)
    dtype = next(iter(views.values())).dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(dict(views), strict=False, assign=True)
    model.tie_weights()
    _rebuild_rotary(model, config, next(iter(views.values())).device)
    left = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if left:
        raise ModelError(f"{folder}: the checkpoint has no {', '.join(left[:3])}")
    model.requires_grad_(False)
    model.config.use_cache = False
    model.eval()
    module: nn.Module = model
    return module


def _rebuild_rotary(model: nn.Module, config: Any, device: torch.device) -> None:
    """Rotary tables are buffers that no checkpoint holds: compute them off the meta device."""
    for name, module in list(model.named_modules()):
        if any(b.is_meta for b in module.buffers(recurse=False)):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, type(module)(config=config).to(device))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


class Adapter:
    """The trainable LoRA: fp32 views of one flat tensor, gradients likewise.

    ``flat`` and ``flat_grad`` hold all weights in the order of ``names`` (PEFT's file names).
    ``attach`` wraps a base; ``detach`` gives the base back as it was, so that several
    adapters train one after another on one base without PEFT's notion of an active adapter.
    """

    def __init__(self, model: PeftModel, spec: LoraSpec) -> None:
        self.model, self.spec = model, spec
        pairs = [(n, p) for n, p in model.named_parameters() if ".lora_" in n]
        self.names = tuple(n.replace(".default.", ".") for n, _ in pairs)
        self.parameters = tuple(p for _, p in pairs)
        size = sum(p.numel() for p in self.parameters)
        self.device = self.parameters[0].device
        self.flat = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.flat_grad = torch.zeros_like(self.flat)
        self._bounds: list[tuple[int, int]] = []
        position = 0
        with torch.no_grad():
            for parameter in self.parameters:
                end = position + parameter.numel()
                view = self.flat[position:end].view(parameter.shape)
                view.copy_(parameter)
                parameter.data = view
                parameter.grad = self.flat_grad[position:end].view(parameter.shape)
                self._bounds.append((position, end))
                position = end

    @classmethod
    def attach(cls, base: nn.Module, spec: LoraSpec, seed: int = 0) -> Adapter:
        """Wrap ``base`` in a fresh LoRA (A random from ``seed``, B zero). Raises ModelError."""
        state = torch.random.get_rng_state()
        try:
            torch.manual_seed(seed)
            with warnings.catch_warnings():  # PEFT 0.21 reads a name that transformers renamed
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
                model = get_peft_model(base, spec.peft_config())
        except ValueError as e:
            raise ModelError(f"target_modules {', '.join(spec.target_modules)}: {e}") from e
        finally:
            torch.random.set_rng_state(state)
        return cls(model, spec)

    def detach(self) -> nn.Module:
        """Take the LoRA layers out; returns the base model."""
        base: nn.Module = self.model.unload()
        base.requires_grad_(False)
        base.eval()
        return base

    def tensors(self) -> dict[str, Tensor]:
        """Views by PEFT's file names (``base_model.model.….lora_A.weight``)."""
        return {n: p.detach() for n, p in zip(self.names, self.parameters, strict=True)}

    def bounds(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Name -> (begin, end, shape) in ``flat``."""
        return {
            n: (*b, tuple(p.shape))
            for n, b, p in zip(self.names, self._bounds, self.parameters, strict=True)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights by name, shapes and finiteness checked. Raises ModelError, all or none."""
        missing = sorted(set(self.names) - set(tensors))
        unknown = sorted(set(tensors) - set(self.names))
        if missing or unknown:
            raise ModelError(
                f"adapter tensors do not match: missing {missing[:3]}, unknown {unknown[:3]}"
            )
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if tensors[name].shape != parameter.shape:
                raise ModelError(
                    f"{name}: shape {tuple(tensors[name].shape)}, {tuple(parameter.shape)} expected"
                )
            if not bool(torch.isfinite(tensors[name]).all()):
                raise ModelError(f"{name}: not finite")
        with torch.no_grad():
            for name, parameter in zip(self.names, self.parameters, strict=True):
                parameter.copy_(tensors[name])

    def freeze(self, part: str) -> None:
        """``"none"``, ``"A"`` (FFA-LoRA, RoLoRA's B turn) or ``"B"`` (RoLoRA's A turn)."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            frozen = part != "none" and f".lora_{part}." in name
            parameter.requires_grad_(not frozen)

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.requires_grad]


def losses(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats of every learnt token, and the row each belongs to.

    Only the positions that are learnt go through the output layer: with a vocabulary of 49k it
    would otherwise be the largest tensor of the step. Equals the full computation.
    """
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    hidden = inner.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
    targets = batch.labels[:, 1:]
    rows, columns = torch.nonzero(targets != IGNORED, as_tuple=True)
    logits = inner.lm_head(hidden[rows, columns]).float()
    return nn.functional.cross_entropy(logits, targets[rows, columns], reduction="none"), rows


def mean_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Mean cross-entropy over the batch's learnt tokens, nats per token."""
    return losses(model, batch)[0].mean()
