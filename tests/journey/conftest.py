"""One whole system, three replicas of a tiny real model, that learns within seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from tests.system.running import System
from tests.tiny import write_adapter

MODEL = "tiny"
EAGER = """
gateway: {tenants: {"": {feedback_adapter: support}}}
replica: {dtype: float32, threads: 1, kv_tokens: 8192, training_nice: 0}
launcher:
  {tick: 0.2, window: 5, window_min: 5, window_max: 10, min_participants: 3, max_wait: 5,
   utilisation_floor: 1.0, queue_floor: 10000, b_floor: 10000}
coordinator:
  training: {accumulation: 1, micro_batch: 4, max_tokens: 128, heldout_samples: 4, rank: 8,
             learning_rate: 0.02, local_steps: 4, max_rounds: 4}
"""
T = TypeVar("T")


class Journey:
    """The running system with the stock client and the commands a person would use."""

    def __init__(self, system: System, model: Path) -> None:
        self.system, self.model = system, model
        self.client: openai.OpenAI = system.client()

    def collm(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "collm", *arguments]
        command += ["--data-dir", str(self.system.data)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def events(self) -> list[dict[str, Any]]:
        """What `collm events` shows, oldest first."""
        lines = self.collm("events", "-n", "1000", "--json").splitlines()
        return [json.loads(line) for line in lines]

    def until(self, look: Callable[[], T], what: str, seconds: float = 400.0) -> T:
        """The first true value of ``look()``."""
        end = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < end, f"{what}:\n{self.collm('events', '-n', '40')}"
            time.sleep(0.1)
        return found

    def say(self, model: str, text: str = "hello", **options: Any) -> str:
        """A greedy answer of eight tokens."""
        answer = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
            **options,
        )
        return str(answer.choices[0].message.content)


@pytest.fixture(scope="package")
def journey(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("journey")
    config = folder / "eager.yaml"
    config.write_text(EAGER)
    options = ("--model", f"{tiny_model}:3", "--served-model-name", MODEL)
    variables = {"COLLM_CONFIG": str(config)}
    with System(folder / "data", *options, variables=variables, start_seconds=200) as system:
        yield Journey(system, tiny_model)


@pytest.fixture(scope="package")
def source(journey: Journey, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PEFT folder below the gateway's adapter root, by the path a client names."""
    made = write_adapter(journey.model, tmp_path_factory.mktemp("source"), seed=3)
    target = journey.system.data / "adapters" / "incoming" / "red"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(made, target)
    return os.fspath(target.relative_to(journey.system.data / "adapters"))
