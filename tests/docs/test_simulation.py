"""The page about simulating names what there is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.latency import LatencyModel
from shared.profile import Profile

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulation.md").read_text()


@pytest.mark.parametrize("kind", [Profile, LatencyModel])
def test_every_field_of_a_profile_is_in_a_table(kind: type[msgspec.Struct]) -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert [field for field in kind.__struct_fields__ if f"`{field}`" not in rows] == []
