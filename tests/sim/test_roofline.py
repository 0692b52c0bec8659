"""Derived profiles: the files are what the code says, and say themselves how to derive them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from shared.latency import LatencyModel
from shared.profile import PROFILES, Profile
from sim import roofline

GIVEN = {"name", "source", "coefficients", "context", "vocabulary", "adapter_slots", "numbers"}


def test_the_files_are_what_the_roofline_writes(tmp_path: Path) -> None:
    for written in roofline.write(tmp_path):
        assert written.read_text() == (PROFILES / written.name).read_text(), (
            "run: python -m sim.roofline"
        )


@pytest.mark.parametrize(("gpu", "model", "gpus"), roofline.DERIVED)
def test_every_figure_of_a_derived_profile_has_its_source(
    gpu: roofline.Gpu, model: roofline.Model, gpus: int
) -> None:
    made = msgspec.convert(roofline.derive(gpu, model, gpus), Profile)
    told = made.numbers
    used = {k for k in LatencyModel.__struct_fields__ if getattr(made.coefficients, k)}
    fields = set(Profile.__struct_fields__) - GIVEN - {"merge_seconds", "merged_speedup"}
    assert used | fields | {"gpu", "model", "merge"} <= told.keys()
    assert ("pair" in told) == (gpus > 1)


@pytest.mark.parametrize("name", ["h20-8b", "a100-13b"])
def test_the_coefficients_follow_from_the_numbers_alone(name: str) -> None:
    """By hand, from the text of the file."""
    read = yaml.safe_load((PROFILES / f"{name}.yaml").read_text())
    n = read["numbers"]

    def first(key: str, pattern: str) -> float:
        found = re.search(pattern, n[key])
        assert found is not None, (key, n[key])
        return float(found[1].replace(",", ""))

    peak = first("gpu", r"([\d.]+) TFLOP") * 1e12
    bandwidth = first("gpu", r"([\d.,]+) [TG]B/s") * (1e12 if "TB/s" in n["gpu"] else 1e9)
    memory = first("gpu", r"([\d.]+) GB$") * 1e9
    count = 2 if "pair" in n else 1
    share = count * (first("pair", r"have ([\d.]+) of twice") if count == 2 else 1.0)
    parameters = first("model", r"([\d.]+) B parameters") * 1e9
    weights = 2 * parameters
    decode = bandwidth * share * first("alpha0", r"at ([\d.]+) of peak")
    kv = first("alpha1", r"(\d+) bytes a token")
    alpha0 = weights / decode + first("alpha0", r"\+ ([\d.]+) ms") / 1e3
    gamma1 = first("gamma1", r"(\d+) FLOP") * parameters * first("gamma1", r"(\d+) tokens a sample")
    gamma1 /= peak * share * first("gamma1", r"([\d.]+) of peak")
    wanted = {
        "alpha0": alpha0,
        "alpha1": first("alpha1", r"KV of (\d+) tokens") * kv / decode,
        "alpha2": first("alpha2", r"([\d.]+) of alpha0") * alpha0,
        "pi0": first("pi0", r"([\d.]+) ms") / 1e3,
        "pi1": 2 * parameters / (peak * share * first("pi1", r"at ([\d.]+) of peak")),
        "pi2": first("alpha2", r"([\d.]+) of alpha0") * alpha0,
        "gamma0": first("gamma0", r"(\d+) times") * weights / decode,
        "gamma1": gamma1,
        "gamma2": first("gamma2", r"([\d.]+) of gamma1") * gamma1,
    }
    assert read["coefficients"] == pytest.approx(wanted, rel=1e-3)
    room = first("kv_tokens", r"^([\d.]+) of the memory") * memory * count
    room -= first("kv_tokens", r"less ([\d.]+) times") * weights
    assert read["kv_tokens"] == pytest.approx(room / kv, abs=1)
