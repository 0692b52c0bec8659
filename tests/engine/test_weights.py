"""The fused weight file: same bytes twice named, written once, never torn."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.replica.checkpoint import WeightsError
from services.replica.weights import open_fused
from tests import tiny


def test_views_hold_the_checkpoints_tensors(tiny_model: Path, tmp_path: Path) -> None:
    original = load_file(tiny_model / "model.safetensors")
    weights = open_fused(tiny_model, "float32", cache=tmp_path)
    for name, tensor in original.items():
        assert torch.equal(weights.views[name], tensor), name


def test_fused_tensors_and_views_are_the_same_memory(tiny_model: Path, tmp_path: Path) -> None:
    weights = open_fused(tiny_model, "bfloat16", cache=tmp_path)
    layer = "model.layers.1."
    qkv = weights.fused[layer + "self_attn.qkv_proj.weight"]
    q, k, v = (weights.views[f"{layer}self_attn.{p}_proj.weight"] for p in "qkv")
    assert torch.equal(qkv, torch.cat([q, k, v]))
    assert qkv.data_ptr() == q.data_ptr()
    assert qkv[q.shape[0] :].data_ptr() == k.data_ptr()
    gate_up = weights.fused[layer + "mlp.gate_up_proj.weight"]
    assert gate_up[128:].data_ptr() == weights.views[layer + "mlp.up_proj.weight"].data_ptr()
    assert all(t.data_ptr() % 64 == 0 for t in weights.fused.values())


def test_the_file_is_valid_safetensors_under_transformers_names(
    tiny_model: Path, tmp_path: Path
) -> None:
    weights = open_fused(tiny_model, "float32", cache=tmp_path)
    read = load_file(weights.path)
    assert torch.equal(read["model.norm.weight"], weights.views["model.norm.weight"])


def test_a_write_in_this_process_does_not_reach_the_file(tiny_model: Path, tmp_path: Path) -> None:
    weights = open_fused(tiny_model, "float32", cache=tmp_path)
    weights.fused["model.norm.weight"].add_(1.0)
    again = open_fused(tiny_model, "float32", cache=tmp_path)
    assert not torch.equal(again.fused["model.norm.weight"], weights.fused["model.norm.weight"])


def test_a_changed_checkpoint_is_fused_again(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", seed=1)
    first = open_fused(folder, "float32").views["model.norm.weight"].clone()
    old = open_fused(folder, "float32").views["model.embed_tokens.weight"].clone()
    tiny.write_model(folder, seed=2)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    new = open_fused(folder, "float32").views
    assert torch.equal(first, new["model.norm.weight"])
    assert not torch.equal(old, new["model.embed_tokens.weight"])


def _open(folder: str, cache: str, results: multiprocessing.Queue[float]) -> None:
    weights = open_fused(folder, "float32", cache=cache)
    results.put(float(weights.fused["model.embed_tokens.weight"].sum()))


def test_two_processes_that_start_together_write_one_good_file(
    tiny_model: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[float] = context.Queue()
    children = [
        context.Process(target=_open, args=(str(tiny_model), str(tmp_path), results))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    sums = [results.get(timeout=90) for _ in children]
    for child in children:
        child.join(30)
    assert sums[0] == sums[1]
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["fused-float32.safetensors"]
    assert not list(tmp_path.glob(".fused-float32.safetensors.[0-9]*"))


def test_pickled_or_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    tiny.write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(WeightsError, match=r"model\.safetensors: no such file.*pickled"):
        open_fused(tmp_path)


def test_a_truncated_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged"):
        open_fused(folder, "float32")


def test_biases_are_fused_like_weights(tmp_path: Path) -> None:
    folder = tiny.write_model(
        tmp_path / "model", model_type="qwen2", architectures=["Qwen2ForCausalLM"]
    )
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    weights = open_fused(folder, "float32")
    bias = weights.fused["model.layers.0.self_attn.qkv_proj.bias"]
    assert bias.shape == (64 + 2 * 32,)
    moved = weights.to("cpu")
    assert torch.equal(
        moved.views["model.layers.0.self_attn.v_proj.bias"],
        weights.views["model.layers.0.self_attn.v_proj.bias"],
    )
