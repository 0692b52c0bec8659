"""What the sharing bench keeps of runs that measured some parts only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.sharing.__main__ import kept


def line(**measured: Any) -> dict[str, Any]:
    empty = {"bench": "sharing", "torn": None, "ce": None, "quick": False, "data": "made"}
    return {**empty, "model": "tiny", **measured}


def test_parts_that_are_run_one_after_another_add_up(tmp_path: Path) -> None:
    path = tmp_path / "sharing.json"
    assert kept(line(torn=0), path) == line(torn=0)
    assert kept(line(ce={"sharing": [1.0]}), path) == line(torn=0, ce={"sharing": [1.0]})
    assert kept(line(torn=3), path)["torn"] == 3  # the later run counts
    assert json.loads(path.read_text())["ce"] == {"sharing": [1.0]}


def test_a_run_of_another_kind_takes_nothing_over(tmp_path: Path) -> None:
    path = tmp_path / "sharing.json"
    kept(line(torn=0, quick=True), path)
    assert kept(line(ce={}), path)["torn"] is None
    assert kept(line(model="other"), path)["ce"] is None
