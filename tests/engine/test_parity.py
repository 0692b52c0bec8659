"""The engine against transformers' generate, token by token, and its two backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.replica.engines.torch.config import read_config
from services.replica.engines.torch.library import NoKernels
from services.replica.engines.torch.native import NativeBackend
from services.replica.engines.torch.reference import TorchBackend
from services.replica.engines.torch.step import Step
from services.replica.weights import open_fused
from shared.settings import user_cache
from tests import tiny
from tests.engine.helpers import (
    ARCHITECTURES,
    generate,
    greedy,
    load,
    prompts,
    request,
    run,
    tokens,
    transformers_model,
    write_architecture,
)

# Elsewhere the flag changes nothing: the same kernels would be compiled and tested twice.
ONLY_AMX = pytest.mark.skipif(
    "amx_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"), reason="no AMX here"
)


@pytest.fixture(scope="session", params=sorted(ARCHITECTURES))
def architecture(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_architecture(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_greedy_equals_transformers_on_fifty_prompts(architecture: Path, kernels: str) -> None:
    questions = prompts(50)
    engine = load(architecture, kernels=kernels)
    got = tokens(run(engine, [request(str(i), p, 8) for i, p in enumerate(questions)]))
    engine.close()
    model = transformers_model(architecture)
    assert not [i for i, p in enumerate(questions) if not greedy(model, p, got[str(i)], 8)]


def test_a_batch_of_32_answers_as_each_alone(architecture: Path) -> None:
    questions = prompts(32, seed=1)
    engine = load(architecture, prefix_cache=False)
    together = tokens(run(engine, [request(str(i), p) for i, p in enumerate(questions)]))
    for i, prompt in enumerate(questions):
        assert tokens(run(engine, [request("alone", prompt)]))["alone"] == together[str(i)]
    engine.close()


def _logits(backend: Any, prompt: list[int], chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits after each token of one prompt, given in chunks (all but seven, and seven)."""
    table = np.arange(1, 5, dtype=np.int32)[None]
    found = []
    begin = 0
    for count in chunks or (len(prompt) - 7, 7):
        end = begin + count
        result = backend.forward(
            Step(
                tokens=np.array(prompt[begin:end], np.int32),
                starts=np.array([0, count], np.int32),
                begins=np.array([begin], np.int32),
                tables=table,
                adapters=[None],
                logit_rows=np.arange(count, dtype=np.int32),
                full=np.ones(count, np.bool_),
                ids=["x"],
            )
        )
        found.append(result.logits)
        begin = end
    return torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "extra", "tolerance"),
    [
        (torch.float32, (), 1e-4),
        (torch.bfloat16, (), 0.06),
        pytest.param(torch.bfloat16, ("-DNO_AMX",), 0.06, marks=[ONLY_AMX]),
    ],
)
def test_native_kernels_compute_what_the_torch_twin_computes(
    architecture: Path, dtype: torch.dtype, extra: tuple[str, ...], tolerance: float
) -> None:
    """Logits relative to their spread; bf16 rounds at other places, so its bound is wider."""
    config = read_config(architecture)
    weights = open_fused(architecture, torch.float32)
    exact = _logits(TorchBackend(config, weights, 8), prompts(1, seed=4)[0] + list(range(3, 60)))
    native = NativeBackend(config, open_fused(architecture, dtype), 8, 2, extra=extra)
    got = _logits(native, prompts(1, seed=4)[0] + list(range(3, 60)))
    assert (got - exact).abs().max() <= tolerance * exact.std() * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_company(tmp_path: Path, dtype: torch.dtype) -> None:
    """Few rows, many rows, and inner sizes beyond what is kept in the cache at once."""
    folder = tiny.write_model(tmp_path, hidden_size=320, intermediate_size=736, head_dim=32)
    native = NativeBackend(read_config(folder), open_fused(folder, dtype), 8, 2)
    prompt = list(range(3, 63))
    together = _logits(native, prompt, (60,))
    assert torch.equal(_logits(native, prompt, (1, 2, 5, 8, 9, 16, 19)), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_logits_as_shared_ones(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = tiny.write_model(tmp_path, vocab_size=272)
    config, weights = read_config(folder), open_fused(folder, dtype)
    shared = NativeBackend(config, weights, 8, 1)
    packed = NativeBackend(config, weights, 8, 1, packed=True)
    assert torch.equal(_logits(shared, list(range(60))), _logits(packed, list(range(60))))


def test_packed_weights_of_an_odd_vocabulary_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    weights = open_fused(tiny_model, torch.float32, cache=tmp_path)
    with pytest.raises(NoKernels, match="vocabulary in sixteens, not 259"):
        NativeBackend(read_config(tiny_model), weights, 8, 1, packed=True)


def test_another_architecture_runs_through_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=259, n_positions=256)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    engine = load(tmp_path)
    assert "slower" in caplog.text
    questions = prompts(5, seed=2)
    got = tokens(run(engine, [request(str(i), p) for i, p in enumerate(questions)]))
    model = transformers_model(tmp_path)
    assert [got[str(i)] for i in range(5)] == [generate(model, p, 16) for p in questions]


SMOLLM = "SmolLM2-135M-Instruct"


@pytest.mark.slow
@pytest.mark.timeout(600)  # fifty prompts through transformers in fp32, three tests at a time
def test_smollm2_greedy_equals_transformers_on_real_prompts(real_data: Path) -> None:
    folder = user_cache() / "models" / SMOLLM
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"{SMOLLM} is not in the model cache")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = (real_data / "instruct/general.jsonl").read_text().splitlines()[:50]
    questions = [
        tokenizer.encode(
            f"<|im_start|>user\n{json.loads(line)['messages'][0]['content']}<|im_end|>\n"
            "<|im_start|>assistant\n"
        ).ids
        for line in lines
    ]
    engine = load(folder, max_step_tokens=256, threads=2, kv_tokens=16384)
    got = tokens(run(engine, [request(str(i), p, 8, stops=(2,)) for i, p in enumerate(questions)]))
    model = transformers_model(folder)
    different = [i for i, p in enumerate(questions) if not greedy(model, p, got[str(i)], 8, stop=2)]
    assert not different
