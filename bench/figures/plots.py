"""Drawing of the evaluation's figures as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

WIDTH, HEIGHT = 9.0, 3.4


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)


def _new(columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    return figure, figure.subplots(1, columns)


def lines(
    path: Path, series: Mapping[str, Sequence[float]], step: float, labels: tuple[str, str]
) -> None:
    """Several series over time; ``step`` is the distance of two values on the x axis."""
    figure, axes = _new()
    for name, values in series.items():
        axes.plot([k * step for k in range(len(values))], values, label=name, linewidth=1)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.legend()
    _save(figure, path)


def by_load(path: Path, table: Mapping[str, Mapping[int, float]], label: str) -> None:
    """One line a policy over the load."""
    figure, axes = _new()
    for name, points in table.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.set(xlabel="load (x)", ylabel=label, xticks=sorted(next(iter(table.values()))))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    _save(figure, path)


def heat(path: Path, panels: Mapping[str, Sequence[Sequence[float]]], width: float) -> None:
    """Utilisation of every replica over time, one panel each."""
    figure, found = _new(len(panels))
    shown = None
    for axes, (title, rows) in zip(
        [found] if len(panels) == 1 else found, panels.items(), strict=True
    ):
        longest = max(map(len, rows))
        image = [[*row, *[0.0] * (longest - len(row))] for row in rows]
        extent = (0, longest * width / 60, len(rows), 0)
        shown = axes.imshow(image, aspect="auto", vmin=0, vmax=1, extent=extent, cmap="viridis")
        axes.set(title=title, xlabel="minutes", ylabel="replica")
    if shown is not None:
        figure.colorbar(shown, ax=found, shrink=0.9)
    _save(figure, path)


def bars(path: Path, panels: Mapping[str, Mapping[str, float]]) -> None:
    """A panel of horizontal bars each."""
    figure, found = _new(len(panels))
    for axes, (title, values) in zip(
        [found] if len(panels) == 1 else found, panels.items(), strict=True
    ):
        axes.barh(list(values), list(values.values()))
        axes.invert_yaxis()
        axes.set(title=title)
        axes.tick_params(labelsize=8)
    _save(figure, path)


def curves(
    path: Path, series: Mapping[str, Sequence[tuple[float, float]]], labels: tuple[str, str]
) -> None:
    """Several series of (x, y)."""
    figure, axes = _new()
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.5)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.legend(fontsize=8)
    _save(figure, path)


def stacked(path: Path, table: Mapping[str, Mapping[str, float]], label: str) -> None:
    """A horizontal bar a row, its parts one after the other."""
    figure, axes = _new()
    parts = list(next(iter(table.values())))
    left = [0.0] * len(table)
    for part in parts:
        values = [row[part] for row in table.values()]
        axes.barh(list(table), values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set(xlabel=label)
    axes.legend(fontsize=8)
    _save(figure, path)


def scatter(path: Path, points: Sequence[Sequence[float]], labels: tuple[str, str, str]) -> None:
    """y over x, coloured by the second value of each (x, colour, y)."""
    figure, axes = _new()
    shown = axes.scatter(
        [p[0] for p in points], [p[2] for p in points], c=[p[1] for p in points], s=8
    )
    figure.colorbar(shown, ax=axes, label=labels[2])
    axes.set(xlabel=labels[0], ylabel=labels[1])
    _save(figure, path)


def cost(path: Path, points: Mapping[int, float], labels: tuple[str, str]) -> None:
    """One line on logarithmic axes."""
    figure, axes = _new()
    axes.loglog(list(points), list(points.values()), marker="o")
    axes.set(xlabel=labels[0], ylabel=labels[1])
    _save(figure, path)
