"""Fits a loss curve to a real run: ``python -m sim.fit_curve POINTS --name NAME``.

Input, JSON: ``{"source": "what was run, when, on what", "points": [[samples, cross-entropy], …]}``
with the held-out cross-entropy (nats/token) after so many samples trained by all clients
together. Or ``--bench FILE``, the line that ``python -m bench.federated`` prints, with
``--samples-per-round``. The result is a file of ``config/curves`` that names its source and how
well it fits.

CE(s) = floor + span (1 + s / scale)^-power is linear in floor and span once scale and power are
chosen; those are searched on a grid that is refined around its best point.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from shared.nnls import nnls
from sim.scenario import CURVES
from sim.training import Curve

Point = tuple[float, float]  # samples trained, cross-entropy
REFINEMENTS = 6
GRID = 17
POWERS = (0.05, 2.0)
LEAST_POINTS = 4


class FitError(ValueError):
    """The points cannot be fitted; the message says what was expected."""


class Learning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The input file."""

    source: str
    points: list[Point]


def fit(points: Sequence[Point], source: str) -> tuple[Curve, float]:
    """The curve with the least squared error, and its R². Raises FitError."""
    ordered = sorted(points)
    samples = np.array([s for s, _ in ordered], dtype=np.float64)
    losses = np.array([ce for _, ce in ordered], dtype=np.float64)
    if len(set(samples)) < LEAST_POINTS:
        raise FitError(f"at least {LEAST_POINTS} different numbers of samples expected")
    if samples[0] < 0 or not np.isfinite(losses).all() or losses.min() <= 0:
        raise FitError("samples from 0 up and cross-entropies above 0 expected")
    most = float(samples[-1])
    scales = (math.log(most / 1e3), math.log(most * 1e2))
    powers = (math.log(POWERS[0]), math.log(POWERS[1]))
    best = (math.inf, 0.0, 0.0)
    for _ in range(REFINEMENTS):
        tried = [
            (_error(samples, losses, math.exp(scale), math.exp(power)), scale, power)
            for scale in np.linspace(scales[0], scales[1], GRID).tolist()
            for power in np.linspace(powers[0], powers[1], GRID).tolist()
        ]
        best = min(best, *tried)
        scales, powers = _around(best[1], scales), _around(best[2], powers)
    scale, power = math.exp(best[1]), math.exp(best[2])
    floor, span = _linear(samples, losses, scale, power)
    total = float(np.sum((losses - losses.mean()) ** 2))
    r2 = 1.0 - best[0] / total if total > 0 else 1.0
    curve = Curve(
        source=source, start=floor + span, floor=floor, scale=scale, power=power, last=points[-1]
    )
    return curve, r2


def _around(best: float, span: tuple[float, float]) -> tuple[float, float]:
    """Two cells of the grid to either side of its best point."""
    width = 2 * (span[1] - span[0]) / GRID
    return best - width, best + width


def _design(samples: Any, scale: float, power: float) -> Any:
    return np.column_stack([np.ones_like(samples), (1.0 + samples / scale) ** -power])


def _linear(samples: Any, losses: Any, scale: float, power: float) -> tuple[float, float]:
    solution, _ = nnls(_design(samples, scale, power), losses)
    return float(solution[0]), float(solution[1])


def _error(samples: Any, losses: Any, scale: float, power: float) -> float:
    left = losses - _design(samples, scale, power) @ _linear(samples, losses, scale, power)
    return float(np.sum(left**2))


def read(path: Path) -> Learning:
    """The points of a file. Raises FitError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Learning)
    except (OSError, msgspec.DecodeError) as e:
        raise FitError(f"{path}: {e}") from e


def of_bench(path: Path, strategy: str, samples_per_round: float) -> Learning:
    """The curve of one strategy in a line of ``bench.federated``. Raises FitError."""
    try:
        line = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
        losses = [line["heldout_ce"]["base"], *line["curves"][strategy]]
    except (OSError, IndexError, ValueError) as e:
        raise FitError(f"{path}: {e}") from e
    except KeyError as e:
        raise FitError(f"{path}: no curve of strategy {strategy!r} from the base on") from e
    points = [(k * samples_per_round, float(ce)) for k, ce in enumerate(losses)]
    return Learning(f"{path.name}: bench.federated, strategy {strategy}", points)


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m sim.fit_curve", description=__doc__)
    p.add_argument("points", type=Path, nargs="?", help="JSON with source and points")
    p.add_argument("--bench", type=Path, help="a line of bench.federated instead")
    p.add_argument("--strategy", default="fedavg")
    p.add_argument("--samples-per-round", type=float, help="of all clients together")
    p.add_argument(
        "--batch", type=float, default=4.0, help="samples of an optimiser step and client"
    )
    p.add_argument("--name", required=True, help="of the curve; also of its file")
    o = p.parse_args()
    if (o.points is None) == (o.bench is None):
        p.error("one of POINTS and --bench")
    if o.bench is not None and not o.samples_per_round:
        p.error("--bench needs --samples-per-round")
    try:
        learning = (
            read(o.points)
            if o.points is not None
            else of_bench(o.bench, o.strategy, o.samples_per_round)
        )
        curve, r2 = fit(learning.points, learning.source)
    except FitError as e:
        p.error(str(e))
    target = CURVES / f"{o.name}.yaml"
    values = msgspec.to_builtins(curve)
    values["batch"] = o.batch
    values["source"] = f"{curve.source}; {len(learning.points)} points, R2 {r2:.4f}"
    head = "# Cross-entropy (nats/token) on held-out references against samples trained on.\n"
    body = yaml.safe_dump(values, sort_keys=False, width=100)
    target.write_text(f"{head}# Written by `python -m sim.fit_curve`.\n{body}", encoding="utf-8")
    print(f"{target}: {values}")


if __name__ == "__main__":
    main()
