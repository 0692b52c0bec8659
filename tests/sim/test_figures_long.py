"""The table over a long span, on a tiny one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.figures import long, runs


def test_every_policy_and_no_training_are_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, store = tmp_path / "out", tmp_path / "kept"
    arguments = ["long", "--hours", "0.01", "--out", str(out), "--store", str(store)]
    arguments += ["--policies", "collm", "round_robin"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(runs, "SATURATION_REQUESTS", 200)
    long.main()
    text = (out / "long.md").read_text()
    facts = json.loads((out / "long.json").read_text())
    for name in ("collm", "round_robin", long.NO_TRAINING):
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
        one = facts["results"][f"{name}, 2x"]
        assert f"{one['goodput_tokens_per_s']:,.0f} ({one['slo_attainment']:.3f})" in row
    assert facts["hours"] == 0.01
    assert facts["results"][f"{long.NO_TRAINING}, 1x"]["training"]["samples"] == 0
    assert "scenario" not in facts["results"]["collm, 1x"]


def test_it_ends_like_the_evaluation_where_it_is_cut_or_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "saturation", cut)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["long", "--out", str(out), "--store", str(tmp_path / "kept")])
    with pytest.raises(SystemExit) as left:
        long.main()
    assert left.value.code == 130
    assert "run the same command again" in capsys.readouterr().err
    out.rmdir()
    out.write_text("")
    with pytest.raises(SystemExit, match=r"bench\.figures\.long: .*File exists"):
        long.main()
