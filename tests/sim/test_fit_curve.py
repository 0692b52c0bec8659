"""A fitted loss curve is the one behind the points."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from sim.fit_curve import FitError, fit, of_bench, read
from sim.training import Curve

TRUE = Curve(source="made", start=2.9, floor=2.1, scale=700.0, power=0.6)


def test_the_curve_behind_noisy_points_is_found() -> None:
    rng = random.Random(3)
    points = [(s, TRUE.cross_entropy(s) + rng.gauss(0, 0.003)) for s in range(0, 12_000, 400)]
    curve, r2 = fit(points, "made")
    assert r2 > 0.99
    for samples in (0.0, 500.0, 3000.0, 11_000.0):
        assert curve.cross_entropy(samples) == pytest.approx(TRUE.cross_entropy(samples), abs=0.02)
    assert curve.source == "made"


def test_losses_that_do_not_fall_give_a_flat_curve() -> None:
    curve, _ = fit([(k * 100.0, 1.5) for k in range(6)], "flat")
    assert curve.cross_entropy(1e6) == pytest.approx(1.5, abs=1e-6)


def test_files_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    good, bench = tmp_path / "run.json", tmp_path / "bench.json"
    good.write_text(json.dumps({"source": "a run", "points": [[0, 2.0], [10, 1.9]]}))
    assert read(good).points == [(0.0, 2.0), (10.0, 1.9)]
    line = {"heldout_ce": {"base": 2.0}, "curves": {"fedavg": [1.8, 1.7]}}
    bench.write_text(f"progress\n{json.dumps(line)}\n")
    assert of_bench(bench, "fedavg", 96.0).points == [(0.0, 2.0), (96.0, 1.8), (192.0, 1.7)]
    with pytest.raises(FitError, match="rolora"):
        of_bench(bench, "rolora", 96.0)
    with pytest.raises(FitError, match=r"none\.json"):
        read(tmp_path / "none.json")
    with pytest.raises(FitError, match="different numbers"):
        fit([(0.0, 2.0), (10.0, 1.9)], "short")
