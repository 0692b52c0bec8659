"""What the image without torch runs does not load it, nor does a command pay for its import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "loads",
    [
        "from collm.cli import build; build()",
        "import sim.scenario",
        "import services.gateway.app",
        "import services.dispatcher.service",
        "import services.launcher.service",
        "import services.coordinator.service",
    ],
)
def test_only_replicas_load_torch(loads: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{loads}\nimport sys; print('torch' in sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
