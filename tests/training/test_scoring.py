"""Scoring a load test: each answer under the version that gave it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from collm.cli import build
from services.replica.training.data import collate
from services.replica.training.model import Adapter, build_base, losses
from services.replica.training.publisher import write_folder
from services.replica.training.scoring import Scorer, score_result
from services.replica.weights import FusedWeights
from shared import chat
from tests.training.conftest import SPEC


def request(index: int, version: str = "", sample: str = "s1", **more: Any) -> dict[str, Any]:
    headers = {"x-collm-adapter-version": version} if version else {}
    return {
        "index": index,
        "model": "math" if version else "tiny",
        "sample": sample,
        "headers": headers,
        "error": None,
        "good": True,
        "output_tokens": 10,
        **more,
    }


def result_of(*requests: dict[str, Any]) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "what is 2"},
    ]
    return {
        "duration": 2.0,
        "requests": list(requests),
        "references": {"s1": {"messages": messages, "reference": "two", "source": "x"}},
    }


@pytest.fixture
def version(tmp_path: Path, tiny_model: Path, weights: FusedWeights) -> Adapter:
    adapter = Adapter.attach(build_base(tiny_model, weights.views), SPEC)
    adapter.load({n: torch.randn_like(t) for n, t in adapter.tensors().items()})
    write_folder(tmp_path, "math", "v1", SPEC, adapter.tensors(), str(tiny_model))
    return adapter


def test_each_request_is_scored_under_its_own_version(
    tmp_path: Path, tiny_model: Path, version: Adapter
) -> None:
    scorer = Scorer(tiny_model, dtype="float32")
    result = result_of(request(0), request(1, "v1"), request(2, "v1"))
    scores = score_result(result, scorer, tmp_path)
    assert scores.cross_entropy[1] == scores.cross_entropy[2] != scores.cross_entropy[0]
    example = scorer.example(result["references"]["s1"]["messages"], "two")
    values, _ = losses(version.model.eval(), collate([example]))
    assert values.numel() == len("two") + 1  # its bytes and the end token
    assert scores.cross_entropy[1] == pytest.approx(float(values.detach().mean()), rel=1e-5)


def test_what_cannot_be_scored_is_counted(tmp_path: Path, tiny_model: Path) -> None:
    result = result_of(request(0, "gone"), request(1, sample="none"), request(2, error="x"))
    scores = score_result(result, Scorer(tiny_model, dtype="float32"), tmp_path)
    assert scores.cross_entropy == {}
    assert scores.unscored == {"no reference": 1, "version gone of math is not on disk": 1}


def test_the_command_fills_the_result(tmp_path: Path, tiny_model: Path, version: Adapter) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result_of(request(0), request(1, "v1"), request(2, "gone"))))
    command = ["score", str(file), "--model", str(tiny_model), "--dtype", "float32"]
    done = CliRunner().invoke(build(), [*command, "--data-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    filled = json.loads(file.read_text())
    assert filled["quality_coverage"] == pytest.approx(2 / 3)
    ce = [filled["cross_entropy"][i] for i in ("0", "1")]
    assert filled["q_goodput"] == pytest.approx(sum(10 / max(c, 0.05) for c in ce) / 2.0)


def test_a_file_that_is_no_detailed_result_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"requests": []}')
    done = CliRunner().invoke(build(), ["score", str(file), "--data-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "--save-detailed" in done.output


def test_batching_changes_no_score(tiny_model: Path, tokenizer: chat.ChatTokenizer) -> None:
    scorer = Scorer(tiny_model, dtype="float32")
    examples = [
        scorer.example([{"role": "user", "content": "q" * (7 * i)}], "a" * (i + 1))
        for i in range(12)
    ]
    together = scorer.score(examples)
    alone = [scorer.score([e])[0] for e in examples]
    assert together == pytest.approx(alone, rel=1e-4)
    assert all(math.isfinite(v) for v in together)
