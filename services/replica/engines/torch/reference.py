"""The model in plain torch: the readable twin of the native kernels, and the CUDA path.

Runs on any device. Tokens of all sequences are flattened through the linear layers; attention
goes per sequence for prompts and in one padded batch for decodes (SDPA). Not run on a GPU by
the tests unless one is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from services.replica.engines.torch.config import ModelConfig
from services.replica.engines.torch.kv import PAGE
from services.replica.engines.torch.lora import Adapter
from services.replica.engines.torch.step import Result, Step
from services.replica.weights import FusedWeights


@dataclass(frozen=True)
class _Plan:
    """Index tensors of a step, made once and used in every layer."""

    cos: Tensor  # [T, head_dim]
    sin: Tensor
    places: Tensor  # [T] place in the KV memory, in tokens
    decode_rows: Tensor  # [D] rows of sequences with one token
    decode_places: Tensor  # [D, longest] places of their tokens
    decode_reach: Tensor  # [D, longest] how far each lies back; negative: not there
    prompts: list[tuple[slice, Tensor, int]]  # rows, places of all tokens, first position
    lora: list[tuple[Adapter, Tensor]]  # adapter, its rows


class TorchBackend:
    """Forward passes through torch operators over paged KV memory."""

    name = "torch"
    reuse = True

    def __init__(self, config: ModelConfig, weights: FusedWeights, pages: int) -> None:
        self._config = config
        self._w = weights.fused
        embed = self._w["model.embed_tokens.weight"]
        self._device, self._dtype = embed.device, embed.dtype
        self._head = embed if config.tied else self._w["lm_head.weight"]
        shape = (config.layers, pages * PAGE, config.kv_heads, config.head_dim)
        self._k = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._v = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._inverse = config.inverse_frequencies().to(self._device)

    def forget(self, sequence: str) -> None:
        """Nothing is kept per sequence."""

    def use_threads(self, count: int) -> None:
        if count != torch.get_num_threads():
            torch.set_num_threads(count)

    @torch.no_grad()
    def forward(self, step: Step) -> Result:
        plan = self._plan(step)
        tokens = torch.from_numpy(step.tokens).to(self._device, torch.int64)
        x = functional.embedding(tokens, self._w["model.embed_tokens.weight"])
        for layer in range(self._config.layers):
            x = self._layer(layer, x, plan)
        rows = torch.from_numpy(step.logit_rows).to(self._device, torch.int64)
        x = self._norm(x[rows], "model.norm.weight")
        logits = functional.linear(x, self._head).float()
        best = logits.argmax(-1).cpu().numpy().astype(np.int64)
        full = torch.from_numpy(step.full)
        return Result(best, logits.cpu()[full] if bool(full.any()) else None)

    def _plan(self, step: Step) -> _Plan:
        places, positions, prompts = [], [], []
        decode_rows, decode_places = [], []
        for s, begin in enumerate(step.begins.tolist()):
            first, end = int(step.starts[s]), int(step.starts[s + 1])
            length = begin + end - first
            pages = torch.from_numpy(step.tables[s, : -(-length // PAGE)]).long()
            own = (pages[:, None] * PAGE + torch.arange(PAGE)).view(-1)[:length]
            places.append(own[begin:])
            positions.append(torch.arange(begin, length))
            if end - first == 1:
                decode_rows.append(first)
                decode_places.append(own)
            else:
                prompts.append((slice(first, end), own.to(self._device), begin))
        angles = torch.cat(positions).to(self._device)[:, None].float() * self._inverse
        angles = torch.cat([angles, angles], -1)
        longest = max((len(p) for p in decode_places), default=0)
        padded = torch.zeros(len(decode_rows), longest, dtype=torch.int64)
        reach = torch.full((len(decode_rows), longest), -1)
        for i, own in enumerate(decode_places):
            padded[i, : len(own)] = own
            reach[i, : len(own)] = torch.arange(len(own) - 1, -1, -1)
        return _Plan(
            angles.cos().to(self._dtype),
            angles.sin().to(self._dtype),
            torch.cat(places).to(self._device),
            torch.tensor(decode_rows, dtype=torch.int64, device=self._device),
            padded.to(self._device),
            reach.to(self._device),
            prompts,
            self._lora_rows(step),
        )

    def _lora_rows(self, step: Step) -> list[tuple[Adapter, Tensor]]:
        rows: dict[int, tuple[Adapter, list[int]]] = {}
        for s, adapter in enumerate(step.adapters):
            if adapter is not None:
                own = rows.setdefault(adapter.uid, (adapter, []))[1]
                own.extend(range(int(step.starts[s]), int(step.starts[s + 1])))
        return [(a, torch.tensor(r, device=self._device)) for a, r in rows.values()]

    def _layer(self, layer: int, x: Tensor, plan: _Plan) -> Tensor:
        c, name = self._config, f"model.layers.{layer}"
        h = self._norm(x, f"{name}.input_layernorm.weight")
        qkv = self._linear(h, f"{name}.self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"), plan)
        q, k, v = torch.split(qkv, [c.q_rows, c.kv_rows, c.kv_rows], -1)
        q = q.view(-1, c.heads, c.head_dim)
        k = k.view(-1, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q = self._norm(q, f"{name}.self_attn.q_norm.weight")
            k = self._norm(k, f"{name}.self_attn.k_norm.weight")
        q, k = _rotate(q, plan), _rotate(k, plan)
        self._k[layer, plan.places] = k
        self._v[layer, plan.places] = v.view(-1, c.kv_heads, c.head_dim)
        o = self._attention(layer, q, plan)
        x = x + self._linear(o, f"{name}.self_attn", "o_proj", ("o_proj",), plan)
        h = self._norm(x, f"{name}.post_attention_layernorm.weight")
        both = self._linear(h, f"{name}.mlp", "gate_up_proj", ("gate_proj", "up_proj"), plan)
        gate, up = both.chunk(2, -1)
        h = functional.silu(gate) * up
        return x + self._linear(h, f"{name}.mlp", "down_proj", ("down_proj",), plan)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._config.eps)
        return self._w[name] * wide.to(x.dtype)

    def _linear(
        self, x: Tensor, block: str, fused: str, members: tuple[str, ...], plan: _Plan
    ) -> Tensor:
        """x W^T + bias of a fused matrix, and each adapter's change on its own rows."""
        y = functional.linear(
            x, self._w[f"{block}.{fused}.weight"], self._w.get(f"{block}.{fused}.bias")
        )
        shapes = self._config.module_shapes()
        for adapter, rows in plan.lora:
            at = 0
            for member in members:
                outputs = shapes[member][0]
                pair = adapter.modules.get(f"{block}.{member}")
                if pair is not None:
                    change = (x[rows] @ pair.a.T) @ pair.b.T * pair.scale
                    y[rows, at : at + outputs] += change
                at += outputs
        return y

    def _attention(self, layer: int, q: Tensor, plan: _Plan) -> Tensor:
        """[T, heads, head_dim] -> [T, heads * head_dim]; keys and values are in the cache."""
        out = torch.empty_like(q)
        window = self._config.windows[layer]
        k_all, v_all = self._k[layer], self._v[layer]
        if len(plan.decode_rows):
            mask = plan.decode_reach >= 0
            if window:
                mask = mask & (plan.decode_reach < window)
            out[plan.decode_rows] = functional.scaled_dot_product_attention(
                q[plan.decode_rows][:, :, None],
                k_all[plan.decode_places].transpose(1, 2),
                v_all[plan.decode_places].transpose(1, 2),
                attn_mask=mask[:, None, None],
                enable_gqa=True,
            )[:, :, 0]
        for rows, places, begin in plan.prompts:
            keys = torch.arange(len(places), device=q.device)
            back = keys[begin:, None] - keys[None]
            mask = back >= 0
            if window:
                mask = mask & (back < window)
            out[rows] = functional.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                k_all[places].transpose(0, 1)[None],
                v_all[places].transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.reshape(len(q), -1)


def _rotate(x: Tensor, plan: _Plan) -> Tensor:
    """Rotary positions, halves convention (RoFormer as in Llama's Hugging Face layout)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * plan.cos[:, None] + turned * plan.sin[:, None]
