"""Control processes stay small and free of torch."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.system.running import System

MEGABYTE = 1e6


def test_each_control_process_of_a_running_system_takes_less_than_100_megabytes(
    emulated: System,
) -> None:
    client = emulated.client()
    for _ in range(20):
        client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    for name in ("gateway", "dispatcher", "redis"):
        size = psutil.Process(emulated.pids()[name]).memory_info().rss
        assert size < 100 * MEGABYTE, f"{name}: {size / MEGABYTE:.0f} MB"


@pytest.mark.parametrize(
    "module",
    [
        "services.gateway.__main__",
        "services.dispatcher.__main__",
        "services.launcher.__main__",
        "services.coordinator.__main__",
        "services.replica.__main__",
        "collm.cli",
        "loadgen.cli",
    ],
)
def test_importing_it_pulls_in_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}\nsys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
