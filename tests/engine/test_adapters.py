"""Adapters in the engine: PEFT's own answers, mixed batches, versions, refusals."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.replica.adapters import AdapterSpec, read_spec
from services.replica.engines.base import AdapterError, Rejected
from services.replica.engines.torch import TorchEngine
from tests import tiny
from tests.engine.helpers import (
    TARGETS,
    greedy,
    load,
    peft_model,
    prompts,
    request,
    run,
    tokens,
    write_adapter,
)

KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 4},
    "attention": {"r": 8, "targets": ["q_proj", "v_proj"]},
    "odd rank": {"r": 5, "targets": ["down_proj", "k_proj", "gate_proj"]},
    "high rank": {"r": 40, "lora_alpha": 40},
    "rslora": {"r": 16, "use_rslora": True, "targets": ["o_proj", "up_proj"]},
    "patterns": {
        "r": 4,
        "rank_pattern": {"q_proj": 12, "layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    },
    "one layer": {"r": 4, "layers_to_transform": [1]},
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("base"), seed=1)


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        kind: write_adapter(model, root / kind, seed=i, **settings)
        for i, (kind, settings) in enumerate(KINDS.items())
    }


@pytest.fixture
def engine(model: Path) -> Iterator[TorchEngine]:
    engine = load(model)
    yield engine
    engine.close()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_every_kind_of_adapter_answers_as_peft_does_in_one_mixed_batch(
    model: Path, adapters: dict[str, Path], kernels: str
) -> None:
    engine = load(model, kernels=kernels)
    for kind, path in adapters.items():
        engine.load_adapter(kind, "1", str(path))
    questions = prompts(3, seed=8, longest=40)
    requests = [
        request(f"{kind or 'base'}/{i}", prompt, 10, adapter=kind)
        for i, prompt in enumerate(questions)
        for kind in [None, *adapters]
    ]
    got = tokens(run(engine, requests))
    different = set()
    for kind, path in adapters.items():
        theirs = peft_model(model, path)
        for i, prompt in enumerate(questions):
            assert greedy(theirs, prompt, got[f"{kind}/{i}"], 10), kind
            different.add(got[f"{kind}/{i}"] != got[f"base/{i}"])
    assert True in different
    engine.close()


def test_adapters_in_a_batch_answer_as_each_alone(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    kinds = list(adapters)
    for kind in kinds:
        engine.load_adapter(kind, "1", str(adapters[kind]))
    requests = [
        request(str(i), prompt, 8, adapter=kinds[i % len(kinds)])
        for i, prompt in enumerate(prompts(32, seed=9))
    ]
    together = tokens(run(engine, requests))
    for one in requests:
        assert tokens(run(engine, [one]))[one.id] == together[one.id]


def test_a_reload_in_mid_answer_leaves_running_requests_on_their_version(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    """Reloading under the same name once reused KV of the old version elsewhere."""
    prompt = list(range(3, 100))
    for name, kind in (("a", "all"), ("b", "attention"), ("x", "all")):
        engine.load_adapter(name, "1", str(adapters[kind]))
    want = tokens(run(engine, [request(n, prompt, 20, adapter=n) for n in ("a", "b")]))
    engine.submit(request("old", prompt, 20, adapter="x"))
    outputs = [o for _ in range(5) for _, o in engine.step_now().outputs]
    engine.load_adapter("x", "2", str(adapters["attention"]))
    parts = run(engine, [request("new", prompt, 20, adapter="x")])
    assert [t for o in outputs + parts["old"] for t in o.tokens] == want["a"]
    assert tokens(parts)["new"] == want["b"]
    assert {o.adapter_version for o in outputs + parts["old"]} == {"1"}
    assert {o.adapter_version for o in parts["new"]} == {"2"}


def test_the_same_version_loaded_again_with_other_content_reuses_no_kv(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    prompt = list(range(3, 100))
    engine.load_adapter("b", "1", str(adapters["attention"]))
    want = tokens(run(engine, [request("b", prompt, adapter="b")]))["b"]
    engine.load_adapter("x", "1", str(adapters["all"]))
    run(engine, [request("first", prompt, adapter="x")])
    engine.load_adapter("x", "1", str(adapters["attention"]))
    assert tokens(run(engine, [request("second", prompt, adapter="x")]))["second"] == want


def test_unload_refuses_new_requests_finishes_old_ones_and_returns_memory(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    engine.load_adapter("a", "1", str(adapters["all"]))
    want = tokens(run(engine, [request("a", [5, 6, 7], 10, adapter="a")]))["a"]
    engine.submit(request("b", [5, 6, 7], 10, adapter="a"))
    first = [o for _ in range(3) for _, o in engine.step_now().outputs]
    resident = weakref.ref(engine.adapters._resident["a", "1"])
    assert engine.unload_adapter("a")
    assert not engine.unload_adapter("a")
    with pytest.raises(Rejected, match="not loaded"):
        engine.submit(request("c", [5], 2, adapter="a"))
    assert [t for o in first + run(engine)["b"] for t in o.tokens] == want
    gc.collect()
    assert resident() is None
    assert engine.adapters.nbytes == 0
    assert engine.status().adapters == {}


def test_versions_pinned_by_a_continuation_come_back_from_disk(
    engine: TorchEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    for version, kind in (("v1", "all"), ("v2", "attention")):
        shutil.copytree(adapters[kind], tmp_path / version)
    engine.load_adapter("a", "v1", str(tmp_path / "v1"))
    old = tokens(run(engine, [request("r", [5, 6, 7], 10, adapter="a")]))["r"]
    other = load(Path(engine.card.path))
    other.load_adapter("a", "v2", str(tmp_path / "v2"))
    rest = run(
        other,
        [request("r", [5, 6, 7], 10, adapter="a", adapter_version="v1", generated=tuple(old[:3]))],
    )
    assert tokens(rest)["r"] == old[3:]
    assert rest["r"][0].adapter_version == "v1"
    with pytest.raises(Rejected, match="no version 'v9'"):
        other.submit(request("s", [5], 2, adapter="a", adapter_version="v9"))


def test_the_least_recently_used_of_65_adapters_leaves_memory_and_comes_back(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    for i in range(65):
        engine.load_adapter(f"a{i}", "1", str(adapters["all" if i == 0 else "attention"]))
    assert len(engine.adapters.resident) == 64
    assert ("a0", "1") not in engine.adapters.resident
    got = tokens(run(engine, [request(n, [5, 6, 7], adapter=n) for n in ("a0", "a1", "a64")]))
    assert got["a0"] != got["a1"] == got["a64"]
    assert len(engine.adapters.resident) == 64


def test_published_tensors_serve_like_the_folder_they_are_saved_in(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    path = adapters["rslora"]
    engine.load_adapter("disk", "1", str(path))
    tensors = load_file(path / "adapter_model.safetensors")
    engine.adapters.load_tensors("memory", "1", tensors, read_spec(path))
    got = tokens(run(engine, [request(n, [5, 6], adapter=n) for n in ("disk", "memory")]))
    assert got["disk"] == got["memory"]


def test_versions_as_one_flat_tensor_serve_like_their_folders(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    """The second of a layout takes the quick way; one of another rank may not."""
    for kind in ("rslora", "rslora", "all", "attention"):
        path = adapters[kind]
        engine.load_adapter("disk", kind, str(path))
        tensors = load_file(path / "adapter_model.safetensors")
        flat, bounds = torch.cat([t.flatten() for t in tensors.values()]), {}
        at = 0
        for name, tensor in tensors.items():
            bounds[name] = (at, at + tensor.numel(), tuple(tensor.shape))
            at += tensor.numel()
        engine.load_adapter_flat("memory", kind, flat, bounds, read_spec(path))
        got = tokens(run(engine, [request(n, [5, 6], adapter=n) for n in ("disk", "memory")]))
        assert got["disk"] == got["memory"]
    flat[7] = math.nan
    with pytest.raises(AdapterError, match="NaN"):
        engine.load_adapter_flat("memory", "bad", flat, bounds, read_spec(path))
    assert engine.adapters.current["memory"] == "attention"


def test_idle_adapters_change_neither_the_base_answer_nor_the_work(
    engine: TorchEngine, adapters: dict[str, Path]
) -> None:
    want = tokens(run(engine, [request("a", [5, 6, 7])]))
    for kind, path in adapters.items():
        engine.load_adapter(kind, "1", str(path))
    assert tokens(run(engine, [request("a", [5, 6, 7])])) == want


NAME = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
SHORT = NAME.removeprefix("base_model.model.")
UNKNOWN = "base_model.model.transformer.h.0.q_proj.lora_A.weight"

# What is done to a folder, to adapter_config.json, to the tensors -> what the refusal must name.
FOLDERS: dict[str, Any] = {
    "empty folder": (lambda f: [x.unlink() for x in f.iterdir()], "adapter_config.json"),
    "no tensors": (lambda f: (f / "adapter_model.safetensors").unlink(), "missing"),
    "truncated": (
        lambda f: os.truncate(f / "adapter_model.safetensors", 2000),
        "adapter_model.safetensors: damaged",
    ),
    "pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "only a pickled file",
    ),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "not JSON"),
}
CONFIGS: dict[str, Any] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "huge rank": ({"r": 9999}, "r is 9999"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha"),
    "other method": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
}
CONTENTS: dict[str, Any] = {
    "NaN": (lambda t: t[NAME].fill_(torch.nan), SHORT),
    "shape": (lambda t: t.update({NAME: t[NAME][:, 1:].contiguous()}), SHORT),
    "missing": (lambda t: t.pop(NAME), SHORT),
    "unknown": (lambda t: t.update({UNKNOWN: t[NAME].clone()}), UNKNOWN),
    "integers": (lambda t: t.update({NAME: t[NAME].to(torch.int32)}), SHORT),
}


def _break(folder: Path, kind: str) -> str:
    """Damages an adapter folder; returns what the refusal must name."""
    if kind in FOLDERS:
        change, named = FOLDERS[kind]
        change(folder)
    elif kind in CONFIGS:
        changes, named = CONFIGS[kind]
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    else:
        change, named = CONTENTS[kind]
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
    return str(named)


@pytest.mark.parametrize("kind", [*FOLDERS, *CONFIGS, *CONTENTS])
def test_a_malformed_adapter_is_refused_by_name_and_the_old_version_stays(
    engine: TorchEngine, adapters: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    engine.load_adapter("a", "1", str(adapters["all"]))
    want = tokens(run(engine, [request("r", [5, 6], adapter="a")]))
    shutil.copytree(adapters["all"], tmp_path / "bad")
    named = _break(tmp_path / "bad", kind)
    with pytest.raises(AdapterError) as caught:
        engine.load_adapter("a", "2", str(tmp_path / "bad"))
    assert named in str(caught.value)
    assert engine.status().adapters == {"a": "1"}
    assert tokens(run(engine, [request("r", [5, 6], adapter="a")])) == want


def test_base_weights_never_change(engine: TorchEngine, adapters: dict[str, Path]) -> None:
    weights = engine.backend._keep  # type: ignore[attr-defined]
    before = {name: tensor.clone() for name, tensor in weights.items()}
    for kind in adapters:
        engine.load_adapter(kind, "1", str(adapters[kind]))
    run(engine, [request(k, [5, 6, 7], adapter=k) for k in adapters])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())


def test_scale_follows_peft() -> None:
    assert AdapterSpec(r=16, lora_alpha=8).scale("x.q_proj", 16) == 0.5
    assert AdapterSpec(r=16, lora_alpha=8, use_rslora=True).scale("x.q_proj", 16) == 2.0
    assert set(TARGETS) >= {"q_proj", "down_proj"}
