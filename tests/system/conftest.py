"""Systems that several tests share; a test that breaks one starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.running import System

SLOW = """
name: slow
source: made up for tests; 20 ms a step
coefficients: {alpha0: 0.02, pi0: 0.02}
b_max: 16
kv_tokens: 65536
context: 512
vocabulary: 259
output_mean: 16
"""


@pytest.fixture(scope="session")
def slow_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An emulated replica slow enough to be killed in the middle of an answer."""
    path = tmp_path_factory.mktemp("profile") / "slow.yaml"
    path.write_text(SLOW)
    return path


@pytest.fixture(scope="package")
def emulated(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[System]:
    """Two emulated replicas that take no time."""
    options = ("--engine", "emulated", "--profile", "zero", "--no-train")
    model = ("--model", f"{tiny_folder}:2", "--served-model-name", "tiny")
    with System(tmp_path_factory.mktemp("emulated"), *options, *model) as system:
        system.await_serving()
        yield system


@pytest.fixture(scope="package")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[System]:
    """One replica that computes a tiny random Llama."""
    model = ("--model", f"{tiny_model}:1", "--served-model-name", "tiny", "--no-train")
    with System(tmp_path_factory.mktemp("real"), *model) as system:
        yield system
