"""Every example runs, against a real system or the simulator."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.settings import child_environment
from tests.journey.conftest import EAGER
from tests.system.running import System

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def _run(name: str, *arguments: str, url: str = "", seconds: float = 240.0) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=ROOT,
        env=child_environment({"COLLM_URL": url, "PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[System]:
    """Emulated replicas, under the policy of the examples."""
    options = ("--engine", "emulated", "--profile", "zero", "--no-train")
    model = ("--model", f"{tiny_folder}:2", "--served-model-name", "tiny")
    policy = ("--policy", "examples.shortest_first:ShortestFirst")
    with System(tmp_path_factory.mktemp("examples"), *options, *model, *policy) as running:
        yield running


def test_the_chat_is_answered_under_a_policy_of_ones_own(system: System) -> None:
    log = (system.data / "logs" / "dispatcher.log").read_text()
    assert "with policy 'shortest_first'" in log
    shown = _run("chat.py", url=system.url)
    assert re.search(r"-- tiny: \d+ tokens in \d+ ms, limit 20000 ms", shown)


def test_the_stream_tells_its_usage_and_can_be_left(system: System) -> None:
    assert re.search(r"-- \d+ tokens", _run("stream.py", "Hello", url=system.url))
    assert "-- left after 2 pieces" in _run("stream.py", "Hello", "--most", "2", url=system.url)
    system.await_drained()


def test_the_simulation_compares_policies_and_replicas() -> None:
    own = "examples.shortest_first:ShortestFirst"
    shown = _run("simulate.py", "--requests", "200", "--policies", "least_loaded", own)
    rows = re.findall(r"(\S+) +(\d) +([\d.]+)% +([\d.]+)", shown)
    assert [(policy, int(n)) for policy, n, *_ in rows] == [
        (policy, n) for policy in ("least_loaded", own) for n in (1, 2, 4, 8)
    ]
    attained = [float(share) for policy, _, share, _ in rows if policy == own]
    assert attained[-1] >= attained[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_file_becomes_a_model(tmp_path: Path, tiny_model: Path) -> None:
    config = tmp_path / "eager.yaml"
    config.write_text(EAGER.replace("min_participants: 3", "min_participants: 1"))
    options = ("--model", f"{tiny_model}:1", "--served-model-name", "tiny")
    variables = {"COLLM_CONFIG": str(config)}
    settings = ("max_rounds=1", "local_steps=2", "rank=4", "max_tokens=64")
    with System(tmp_path / "data", *options, variables=variables, start_seconds=200) as system:
        shown = _run(
            "finetune.py",
            str(EXAMPLES / "data" / "returns.jsonl"),
            *(part for value in settings for part in ("--set", value)),
            url=system.url,
            seconds=400,
        )
    assert re.search(r"-- succeeded: \S*support", shown), shown


def test_the_readme_of_the_examples_names_every_file() -> None:
    told = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert told == {p.name for p in EXAMPLES.glob("*.py") if p.name != "__init__.py"}
