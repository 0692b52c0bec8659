"""``collm score``: quality of a load test's answers, after the run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from collm import models
from collm.console import fail, out, tell
from collm.where import DataOption, data_folder
from loadgen.metrics import apply_quality


def register(app: typer.Typer) -> None:
    app.command()(score)


def score(
    result: Annotated[Path, typer.Argument(help="Result of `collm replay --save-detailed`")],
    model: Annotated[
        str, typer.Option(help="Base model: folder or name in the cache")
    ] = models.DEFAULT_NAME,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line")] = False,
    data_dir: DataOption = None,
) -> None:
    """Cross-entropy of each reference under the version that served it; fills q_goodput.

    Writes ``q_goodput``, ``quality_coverage`` and ``cross_entropy`` (by request) into RESULT.
    """
    content = _read(result)
    found = _score(content, model, dtype, data_folder(data_dir))
    apply_quality(content, found.cross_entropy)
    content["cross_entropy"] = {str(i): ce for i, ce in sorted(found.cross_entropy.items())}
    result.write_bytes(orjson.dumps(content))
    mean = sum(found.cross_entropy.values()) / max(1, len(found.cross_entropy))
    summary = {
        "q_goodput": content["q_goodput"],
        "quality_coverage": content["quality_coverage"],
        "mean_cross_entropy": mean if found.cross_entropy else None,
        "unscored": found.unscored,
    }
    if as_json:
        print(orjson.dumps(summary).decode())
        return
    for reason, count in found.unscored.items():
        tell(f"{count} answers not scored: {reason}")
    out.print(summary)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: Any = orjson.loads(path.read_bytes())
    except OSError as e:
        fail(f"{path}: {e.strerror or e}")
    except orjson.JSONDecodeError as e:
        fail(f"{path}: not JSON: {e}")
    if not isinstance(content, dict) or "requests" not in content or "references" not in content:
        fail(f"{path}: no detailed result; run the load generator with --save-detailed")
    return content


def _score(content: dict[str, Any], model: str, dtype: str, data_dir: Path) -> Any:
    """The scorer needs torch, which is only installed where replicas run: imported late."""
    try:
        scoring = importlib.import_module("services.replica.training.scoring")
    except ModuleNotFoundError as e:
        fail(f"scoring needs the packages ({e.name} is missing): pip install collm[replica]")
    try:
        folder = models.resolve(model, tell).path
        scorer = scoring.Scorer(folder, dtype=dtype)
    except (models.ModelError, ValueError) as e:
        fail(str(e))
    return scoring.score_result(content, scorer, data_dir, tell)
