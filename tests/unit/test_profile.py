"""Hardware profiles: a slip in a file is told, not simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import profile

GOOD = """
name: mine
source: test
coefficients: {alpha0: 0.01, alpha1: 0.0005}
b_max: 8
"""


@pytest.mark.parametrize(
    ("instead", "of", "told"),
    [
        ("b_maxx: 8", "b_max: 8", "unknown field `b_maxx`"),
        ("b_max: 0", "b_max: 8", r"Expected `int` >= 1 - at `\$.b_max`"),
        ("context: -4", "b_max: 8", r"Expected `int` >= 1 - at `\$.context`"),
        ("jitter: -1", "b_max: 8", r"at `\$.jitter`"),
        ("merged_speedup: 0", "b_max: 8", r"at `\$.merged_speedup`"),
        ("alpah1: 0.0005", "alpha1: 0.0005", "no coefficient 'alpah1'; known: alpha1, alpha2"),
        ("alpha1: -1", "alpha1: 0.0005", "coefficients.alpha1: .*at least 0, expected, not -1"),
        ("alpha1: .nan", "alpha1: 0.0005", "coefficients.alpha1: a finite number"),
        ("alpha1: .inf", "alpha1: 0.0005", "coefficients.alpha1: a finite number"),
    ],
)
def test_a_slip_in_a_profile_is_told_with_its_place(
    tmp_path: Path, instead: str, of: str, told: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    assert profile.load(str(file)).b_max == 8
    file.write_text(GOOD.replace(of, instead))
    with pytest.raises(profile.ProfileError, match=f"mine.yaml: .*{told}"):
        profile.load(str(file))


def test_every_profile_that_comes_along_is_read() -> None:
    for file in profile.PROFILES.glob("*.yaml"):
        assert profile.load(file.stem).name == file.stem
