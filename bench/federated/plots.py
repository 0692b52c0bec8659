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
    """Joint completion time over Q-goodput, one point a way of choosing (B, b): medians, and
    each run small. And the losses over time that the times are read from."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for number, point in enumerate(points):
        own, colour = point["pair"] == "coordinator", f"C{number}"
        name = str(point["pair"])
        for run in point["runs"]:
            if run["jct"] is not None:
                left.scatter(run["q_goodput"], run["jct"], color=colour, s=15, alpha=0.6)
            right.plot(*zip(*run["curve"], strict=True), color=colour, marker=".", linewidth=1)
        if point["jct"] is not None:
            left.scatter(
                point["q_goodput"],
                point["jct"],
                marker="*" if own else "o",
                s=160 if own else 80,
                color=colour,
                label=name,
            )
        right.plot([], [], color=colour, label=name)
    left.set(xlabel="Q-goodput, quality-weighted tokens/s", ylabel="time to the target loss, s")
    right.set(xlabel="s", ylabel="held-out loss, nats/token")
    left.legend(fontsize=8, title="(B, b)")
    right.legend(fontsize=8)
    _save(figure, out / "federated-pairs.png")


def overhead(rounds: Sequence[Mapping[str, Any]], out: Path) -> None:
    """A bar a round: seconds of the slowest client's steps and of everything else."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for number, found in enumerate(rounds):
        bottom = 0.0
        for colour, (name, seconds) in enumerate(breakdown(found).items()):
            label = name if number == 0 else None
            axes.bar(str(found["round"]), seconds, bottom=bottom, color=f"C{colour}", label=label)
            bottom += seconds
    axes.set(xlabel="round", ylabel="s")
    axes.legend(fontsize=8)
    _save(figure, out / "federated-overhead.png")


def breakdown(found: Mapping[str, Any]) -> dict[str, float]:
    """Where a round's seconds went: its slowest client's stages, then the coordinator's."""
    client, stages = dict(found["slowest"]), dict(found["stages"])
    whole = stages.pop("clients", 0.0)
    steps = client.pop("train", 0.0) + client.pop("wait", 0.0) + client.pop("update", 0.0)
    parts = {"steps": steps, **client, **stages}
    parts["queue and gathering"] = max(0.0, whole - steps - sum(client.values()))
    parts["publish"] = parts.get("publish", 0.0) + max(0.0, found["seconds"] - sum(parts.values()))
    return {name: round(value, 3) for name, value in parts.items()}


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
