"""All benchmarks in one run: what is ended leaves nothing behind, what is done is never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import all as every
from bench import azure, child
from bench.all import Part

ROOT = Path(__file__).resolve().parents[2]
# A benchmark that starts a process, as `collm up` is one, and stops it on its way out.
TIDY = """
import pathlib, subprocess, sys, time
started = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(str(started.pid))
try:
    time.sleep(600)
finally:
    started.terminate()
    started.wait()
    pathlib.Path(sys.argv[1] + ".stopped").write_text("in order")
"""
DEAF = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
time.sleep(600)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which benchmarks of the tests' own are run."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{folder}")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _gone(pid: int) -> bool:
    """It may be a zombie for a moment: who adopts it takes its status."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def _cut(module: str, modules: Path, code: str, grace: float) -> tuple[int, Path]:
    """Process that the benchmark had started when its time was up, and the benchmark's note."""
    (modules / f"{module}.py").write_text(code)
    note = modules / "note"
    with pytest.raises(child.TooLong):
        child.run(module, [str(note)], 4.0, modules / "out", grace)
    return int(note.read_text()), modules / "note.stopped"


def test_a_benchmark_whose_time_is_up_stops_what_it_started(modules: Path) -> None:
    started, stopped = _cut("tidy_bench", modules, TIDY, 30.0)
    assert stopped.read_text() == "in order"
    assert _gone(started)


def test_one_that_does_not_listen_is_killed_with_all_its_processes(modules: Path) -> None:
    started, _ = _cut("deaf_bench", modules, DEAF, 0.5)
    assert _gone(started)


GOOD = "import json, sys; print('words'); print(json.dumps({'bench': 'x', 'got': sys.argv[1:]}))"
PARTS = {
    "good_bench": GOOD,
    "bad_bench": "raise SystemExit(7)",
    "mute_bench": "print('no JSON')",
    "slow_bench": "import time; time.sleep(600)",
}


class OfATest(Part):
    """Its module is the tests' own."""

    @property
    def module(self) -> str:
        return self.name


@pytest.fixture
def parts(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in PARTS.items():
        (modules / f"{name}.py").write_text(code)
    made = [OfATest(name, 0.05 if name == "slow_bench" else 5, 5, ("--small",)) for name in PARTS]
    made += [OfATest("absent_bench", 5, 5, ()), OfATest("traced_bench", 5, 5, (), traces=True)]
    monkeypatch.setattr(every, "PARTS", tuple(made))
    monkeypatch.setattr(every.child, "GRACE", 5.0)


def _all(out: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = every.main(["--out", str(out), *arguments])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_what_failed_or_was_skipped_is_told_and_the_rest_is_there(
    tmp_path: Path, parts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = _all(tmp_path / "out", capsys)
    assert status == 1
    assert line["failed"].keys() == {"bad_bench", "mute_bench", "slow_bench"}
    assert line["failed"]["bad_bench"] == "exit code 7"
    assert "last line is no JSON" in line["failed"]["mute_bench"]
    assert "ended after 0.05 min" in line["failed"]["slow_bench"]
    assert line["skipped"]["absent_bench"] == "not in this installation"
    assert "--data FOLDER" in line["skipped"]["traced_bench"]
    assert "github.com/Azure/AzurePublicDataset" in line["skipped"]["traced_bench"]
    assert line["results"][0]["got"] == []
    assert line["machine"]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == line
    assert "words" in (tmp_path / "out" / "good_bench.out").read_text()


def test_quick_sizes_come_before_what_is_asked_for_and_only_names_are_run(
    tmp_path: Path, parts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--with", "good_bench=--small=no")
    status, line = _all(tmp_path, capsys, "--quick", "--only", "good_bench", *more)
    assert status == 0
    assert [r["bench"] for r in line["results"]] == ["x"]
    assert line["results"][0]["got"] == ["--small", "--small=no"]
    assert line["quick"] is True


def test_each_result_is_in_the_file_before_the_next_begins(
    tmp_path: Path, parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(part: Part, *_: object) -> dict[str, Any]:
        file = tmp_path / "results.json"
        seen.append(len(json.loads(file.read_text())["results"]) if file.exists() else 0)
        return {"bench": part.name}

    monkeypatch.setattr(every, "run", run)
    every.main(["--out", str(tmp_path), "--only", "good_bench", "bad_bench", "mute_bench"])
    assert seen == [0, 1, 2]


def test_sigterm_ends_the_one_that_runs_and_tells_the_others(modules: Path) -> None:
    """As Ctrl-C does; the whole run is a process here, because signals are."""
    code = (
        "import sys; from bench import all as every\n"
        "class P(every.Part):\n    module = property(lambda self: self.name)\n"
        "every.PARTS = (P('tidy_bench', 5, 5, ()), P('good_bench', 5, 5, ()))\n"
        f"every.arguments_of = lambda part, o: [{str(modules / 'note')!r}]\n"
        f"sys.exit(every.main(['--out', {str(modules)!r}]))\n"
    )
    (modules / "tidy_bench.py").write_text(TIDY)
    (modules / "good_bench.py").write_text(GOOD)
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    note = modules / "note"
    for _ in range(600):
        if note.exists() and note.read_text():
            break
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    told, _ = run.communicate(timeout=120)
    line = json.loads(told.splitlines()[-1])
    assert line["failed"] == {"tidy_bench": "interrupted"}
    assert line["skipped"] == {"good_bench": "interrupted before it began"}
    assert (modules / "note.stopped").exists()
    assert _gone(int(note.read_text()))


def test_entries_of_a_list_are_in_the_table_under_what_they_name() -> None:
    validity = [
        {"policy": "collm", "load": 0.06, "goodput_error": 0.0123, "real": {"p50": 5}},
        {"policy": "dlora", "load": 0.06, "goodput_error": None},
    ]
    result = {"bench": "sim", "validity": validity, "plain": [{"seconds": 2}], "curve": [1, 2]}
    columns = [list(column.cells) for column in every.table([result]).columns]
    assert list(zip(columns[1], columns[2], strict=True)) == [
        ("validity(collm, 0.06).goodput_error", "0.0123"),
        ("validity(collm, 0.06).real.p50", "5"),
        ("validity(dlora, 0.06).goodput_error", "None"),
        ("plain(0).seconds", "2"),
    ]


def test_the_simulators_validity_is_run_where_there_are_traces_but_not_when_quick(
    tmp_path: Path,
) -> None:
    for tag in azure.TAGS:
        (tmp_path / f"{tag}.csv").touch()
    part = next(p for p in every.PARTS if p.name == "sim")
    data = ["--data", str(tmp_path)]
    assert every.arguments_of(part, every.options(data)) == data
    assert every.arguments_of(part, every.options([*data, "--quick"])) == list(part.quick)
    assert every.arguments_of(part, every.options([])) == []
    assert not part.traces, "without traces it measures speed"


def test_every_benchmark_has_a_target_a_quick_size_and_a_limit() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = makefile.split("BENCHES := ")[1].splitlines()[0].split()
    assert {part.name for part in every.PARTS} == set(targets)
    for part in every.PARTS:
        assert part.quick
        assert part.quick_minutes < part.minutes
    assert sum(part.quick_minutes for part in every.PARTS) <= 80, "about an hour"


@pytest.mark.parametrize("name", [part.name for part in every.PARTS])
def test_the_arguments_of_the_quick_sizes_are_known_to_the_benchmarks(
    name: str, tmp_path: Path
) -> None:
    """Given with --help they are looked at, and nothing is run."""
    part = next(p for p in every.PARTS if p.name == name)
    done = subprocess.run(
        [sys.executable, "-m", part.module, *part.quick, "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for option in (a for a in part.quick if a.startswith("--")):
        assert option.replace("--no-", "--") in done.stdout


def test_traces_are_found_by_their_task_and_missing_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "AzureLLMInferenceTrace_code.csv").touch()
    with pytest.raises(azure.NoTraces, match=r"no CSV with 'conv'.*Azure/AzurePublicDataset"):
        azure.traces(tmp_path)
    (tmp_path / "x_conv_1week.csv.gz").touch()
    found = azure.traces(tmp_path)
    assert [found[tag].name for tag in ("code", "conv")] == [
        "AzureLLMInferenceTrace_code.csv",
        "x_conv_1week.csv.gz",
    ]


@pytest.mark.parametrize("bench", ["pacing", "policies"])
@pytest.mark.parametrize("data", [(), ("--data", "nowhere")])
def test_a_benchmark_without_its_traces_says_in_one_line_what_to_add(
    bench: str, data: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{bench}", *data],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"bench.{bench}" in line
    assert "--data" in line
    assert "github.com/Azure/AzurePublicDataset" in line
