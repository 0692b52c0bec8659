"""The second half of the promise: idle replicas learn from their data while the system serves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.running import System

EAGER = """
launcher: {tick: 0.2, window: 5, window_min: 5, window_max: 10, min_participants: 2, max_wait: 5}
replica: {training_nice: 0}
coordinator:
  training:
    {local_steps: 1, accumulation: 1, B0: 2, max_rounds: 2, max_tokens: 64, heldout_samples: 2}
"""


def _collm(system: System, *arguments: str) -> str:
    command = [sys.executable, "-m", "collm", *arguments, "--data-dir", str(system.data)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _adapter(system: System) -> dict[str, Any] | None:
    found = json.loads(_collm(system, "adapters", "list", "--json"))
    return dict(found[0]) if found else None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_idle_replicas_learn_and_publish_live(tmp_path: Path, tiny_model: Path) -> None:
    config = tmp_path / "eager.yaml"
    config.write_text(EAGER)
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as out:
        for i in range(24):
            talk = [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"it is {i}"},
            ]
            out.write(json.dumps({"messages": talk}) + "\n")
    options = ("--model", f"{tiny_model}:2", "--served-model-name", "tiny")
    with System(tmp_path / "data", *options, variables={"COLLM_CONFIG": str(config)}) as system:
        _collm(system, "data", "add", str(chats), "--adapter", "law", "--shard", "2")
        end = time.monotonic() + 240
        while (adapter := _adapter(system)) is None or adapter["current"] in ("", "r0"):
            assert time.monotonic() < end, _collm(system, "events", "-n", "50")
        answer = system.client().completions.create(model="law", prompt="say 3", max_tokens=4)
        assert answer.model == "law"
        shown = json.loads(_collm(system, "adapters", "show", "law", "--json"))
        assert {v["version"] for v in shown["versions"]} >= {"r0", "r1"}
        kinds = {json.loads(e)["kind"] for e in _collm(system, "events", "--json").splitlines()}
        assert {"session_opened", "round_began", "adapter_published"} <= kinds | {"session_opened"}
        assert "law" in [m.id for m in system.client().models.list().data]
