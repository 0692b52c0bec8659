"""PNG plots of the sharing benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from shared.quality import MIN_CE


def grid(cells: Sequence[Mapping[str, float]], out: Path) -> None:
    """T_infer over b for each B, T_train over B for each b."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for B in sorted({c["B"] for c in cells}):
        line = [(c["b"], 1e3 * c["t_infer"]) for c in cells if c["B"] == B and c["t_infer"]]
        left.plot(*zip(*line, strict=True), marker="o", label=f"B = {B:.0f}")
    for b in sorted({c["b"] for c in cells}):
        line = [(c["B"], 1e3 * c["t_train"]) for c in cells if c["b"] == b and c["t_train"]]
        if line:
            right.plot(*zip(*line, strict=True), marker="o", label=f"b = {b:.0f}")
    left.set(xlabel="requests decoding together, b", ylabel="decode iteration, ms")
    right.set(xlabel="training micro-batch, B", ylabel="micro-step, ms")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.legend()
    _save(figure, out / "sharing-interference.png")


def learning(found: Mapping[str, Any], out: Path) -> None:
    """Held-out cross-entropy over time, and the distribution of the answers' quality."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for name, values in found["ce"].items():
        times = np.linspace(0, found["seconds"], len(values))
        left.plot(times, values, marker=".", label=name)
    for name, values in found["per_answer"].items():
        quality = np.sort(1 / np.maximum(values, MIN_CE))
        right.plot(quality, np.arange(1, len(quality) + 1) / len(quality), label=name)
    left.set(xlabel="seconds", ylabel="cross-entropy of references, nats/token")
    right.set(xlabel="quality, 1 / cross-entropy", ylabel="part of the answers")
    left.legend()
    right.legend()
    _save(figure, out / "sharing-learning.png")


def above(per_answer: Mapping[str, Sequence[float]], quality: float) -> dict[str, float]:
    """Part of the answers with a quality above ``quality``."""
    return {
        name: float(np.mean(1 / np.maximum(values, MIN_CE) > quality))
        for name, values in per_answer.items()
    }


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
