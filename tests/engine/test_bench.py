"""The engine's benchmark: parts that compare settings of this engine, and what peers are given."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.engine import accuracy, gguf_file, material, prefix
from bench.engine.runner import Worker, WorkerError
from bench.engine.variants import NAMES, Variants
from services.replica.weights import open_fused
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.write_model(
        tmp_path_factory.mktemp("bench"), vocab_size=272, max_position_embeddings=8192
    )
    return tiny.write_tokenizer(made)


def test_an_adapter_is_measured_in_every_way(folder: Path, tmp_path: Path) -> None:
    (adapter,) = material.write_adapters(folder, tmp_path, 1, torch.float32)
    ways = Variants(folder, Path(adapter), torch.float32, 1)
    rates = ways.compare([[5, 6, 7]] * 4, 4, 2, 1)
    assert set(rates) == set(NAMES)
    assert all(rate > 0 for rate in rates.values())
    shadowed = ways._engines["shadow"].adapters.current["a"]
    assert int(shadowed) >= 8, "a version before every step of two batches of four tokens"
    ways.close()


def test_in_full_precision_merging_changes_nothing(folder: Path, tmp_path: Path) -> None:
    (adapter,) = material.write_adapters(folder, tmp_path, 1, torch.float32)
    found = accuracy.compare(folder, Path(adapter), [list(range(3, 43))], torch.float32, 1)
    assert abs(found["kl"]) < 1e-8
    assert found["loss_merged"] == pytest.approx(found["loss_unmerged"], abs=1e-5)


def test_a_kept_beginning_is_not_computed_again(folder: Path) -> None:
    settings = {"dtype": "float32", "threads": 1, "weights": "shared"}
    found = prefix.compare(folder, settings, chats=2, tokens=2, rounds=1)
    reused, computed = found["reused"], found["computed"]
    assert reused["prefill_tokens"] < computed["prefill_tokens"] / 2
    assert len(reused["ttft_ms"]) == prefix.TURNS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_for_llama_cpp_holds_the_same_numbers(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    import gguf

    reader = gguf.GGUFReader(gguf_file.write(folder, tmp_path / "model.gguf", dtype))
    tensors = {t.name: t for t in reader.tensors}
    views = open_fused(folder, dtype).views
    down = views["model.layers.1.mlp.down_proj.weight"]
    assert _numbers(tensors["blk.1.ffn_down.weight"], dtype).equal(down)
    q = _numbers(tensors["blk.0.attn_q.weight"], dtype).view(4, 8, 2, 64)
    original = views["model.layers.0.self_attn.q_proj.weight"].view(4, 2, 8, 64)
    assert q.transpose(1, 2).equal(original), "each rotary pair side by side"
    assert "output.weight" not in tensors, "tied to the embedding"


def _numbers(tensor: object, dtype: torch.dtype) -> torch.Tensor:
    data = np.array(tensor.data)  # type: ignore[attr-defined]
    shape = [int(n) for n in reversed(tensor.shape)]  # type: ignore[attr-defined]
    return torch.from_numpy(data).view(torch.uint8).view(dtype).view(shape)


def test_a_peer_that_dies_is_told_from_one_that_answers() -> None:
    with pytest.raises(WorkerError, match="ended with status -4"):
        Worker([sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"], {})
