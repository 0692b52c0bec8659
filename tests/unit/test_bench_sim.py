"""The simulator's own benchmark: its options, and memory measured at two lengths."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import sim
from bench.sim import options, peak_mb

ROOT = Path(__file__).resolve().parents[2]


def test_the_line_has_peak_memory_at_two_lengths_and_their_ratio() -> None:
    small = ("--requests", "400", "--sizes", "2", "--size-requests", "50")
    done = subprocess.run(
        [sys.executable, "-m", "bench.sim", *small],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    memory = line["rss_mb_by_requests"]
    assert memory.keys() == {"40", "400"}
    assert memory["400"] == line["rss_mb"] > 10
    assert line["rss_ratio"] == pytest.approx(memory["400"] / memory["40"], abs=1e-3)
    assert line["replicas"]["2"] > 0
    assert line["validity"] == []


def test_memory_is_the_programs_own_not_that_of_the_one_that_started_it(tmp_path: Path) -> None:
    """A large process starts a small one: what the kernel keeps over exec is the large one's."""
    code = (
        "import subprocess, sys\n"
        "held = bytearray(400_000_000)\n"
        "small = 'from bench.sim import peak_mb; print(peak_mb())'\n"
        "print(subprocess.check_output([sys.executable, '-c', small], text=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert 10 < float(done.stdout) < 300, done.stderr
    status = tmp_path / "status"
    status.write_text("VmPeak:\t  9000 kB\nVmHWM:\t  123456 kB\n", encoding="ascii")
    assert peak_mb(status) == 123.456
    assert peak_mb(tmp_path / "no such system") > 10


def test_data_gives_validity_both_traces(tmp_path: Path) -> None:
    for tag in ("code", "conv"):
        (tmp_path / f"{tag}.csv").touch()
    o = options(["--data", str(tmp_path)])
    assert o.trace == [f"{tag}={tmp_path / tag}.csv" for tag in ("code", "conv")]
    assert len(o.loads) == len(o.cpu_loads) == 2
    assert len(o.policies) == 3
    assert options([]).trace == []


def test_validity_is_run_only_with_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fast(replicas: int, requests: int, policy: str) -> dict[str, float]:
        asked.append((replicas, requests, policy))
        return {"requests_s": 1.0, "rss_mb": 50.0 + requests}

    def compared(o: argparse.Namespace, _: Path) -> list[dict[str, Any]]:
        return [{"policy": o.policies[0]}]

    asked: list[tuple[int, int, str]] = []
    monkeypatch.setattr(sim, "speed", fast)
    monkeypatch.setattr(sim, "both", compared)
    without = sim.measure(options(["--requests", "50"]), tmp_path)
    assert without["validity"] == []
    assert without["rss_mb_by_requests"] == {"5": 55.0, "50": 100.0}
    assert without["rss_ratio"] == 1.818
    assert asked[:2] == [(16, 5, "collm"), (16, 50, "collm")]
    assert [size for size, _, _ in asked[2:]] == [16, 1000, 10_000]
    assert {policy for _, _, policy in asked} == {"collm"}, "least_loaded does not end at 10,000"
    found = sim.measure(options(["--requests", "50", "--trace", "t.csv"]), tmp_path)
    assert found["validity"] == [{"policy": "least_loaded"}]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "nowhere"], "github.com/Azure/AzurePublicDataset"),
        (["--requests", "9"], "at least 10"),
    ],
)
def test_bad_options_are_told_at_once(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        options(arguments)
    assert left.value.code == 2
    assert told in capsys.readouterr().err
