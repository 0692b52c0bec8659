"""PNG plots of the federated benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def curves(base: float, solo: Mapping[str, Any], strategies: Mapping[str, Any], out: Path) -> None:
    """Mean held-out loss over the three domains by round, a line a strategy."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, found in strategies.items():
        axes.plot(range(len(found["curve"]) + 1), [base, *found["curve"]], marker="o", label=name)
    for client, found in solo.items():
        style = {"linestyle": ":", "color": "grey"}
        axes.plot(
            range(len(found["curve"]) + 1),
            [base, *found["curve"]],
            label=f"{client} alone",
            **style,
        )
    axes.set(xlabel="round", ylabel="held-out loss, mean of three domains (nats/token)")
    axes.legend(fontsize=8)
    _save(figure, out / "federated-strategies.png")


def prediction(pairs: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Measured against predicted iteration time for pairs that were left out of the fit."""
    figure, axes = plt.subplots(figsize=(5, 5))
    measured = [1e3 * p["measured"] for p in pairs]
    predicted = [1e3 * p["predicted"] for p in pairs]
    axes.scatter(measured, predicted)
    for p, x, y in zip(pairs, measured, predicted, strict=True):
        axes.annotate(f"{p['pair'][0]},{p['pair'][1]}", (x, y), fontsize=7)
    top = 1.1 * max([*measured, *predicted, 1e-3])
    axes.plot([0, top], [0, top], color="grey", linewidth=1)
    axes.set(xlabel="measured, ms", ylabel="predicted, ms", title="decode iteration at (b, B)")
    _save(figure, out / "federated-fit.png")


def against_fixed(points: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Joint completion time over Q-goodput, one point a way of choosing (B, b)."""
    figure, axes = plt.subplots(figsize=(6, 4.5))
    for point in points:
        if point["jct"] is None:
            continue
        own = point["pair"] == "coordinator"
        axes.scatter(point["q_goodput"], point["jct"], marker="*" if own else "o", s=120)
        axes.annotate(str(point["pair"]), (point["q_goodput"], point["jct"]), fontsize=8)
    axes.set(xlabel="Q-goodput, quality-weighted tokens/s", ylabel="time to the target loss, s")
    _save(figure, out / "federated-pairs.png")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
