"""Where a result says it comes from, and how far a run says it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import origin
from bench.progress import Progress


def _git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_told_and_whether_files_were_changed_since(tmp_path: Path) -> None:
    assert origin.commit(tmp_path) is None, "not a checkout"
    _git(tmp_path, "init", "-q")
    file = tmp_path / "file"
    file.write_text("one")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-q", "-m", "one")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert origin.commit(tmp_path) == head[:12]
    file.write_text("two")
    assert origin.commit(tmp_path) == f"{head[:12]} and changes"
    inside = tmp_path / "inside"
    inside.mkdir()
    assert origin.commit(inside) is None, "the folder of another project"


def test_the_command_is_the_one_that_was_typed() -> None:
    code = "from bench import origin; print(origin.command())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--out", "a folder"],
        cwd=origin.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip().endswith("--out 'a folder'")


def test_the_command_does_not_tell_where_things_lie_on_this_machine(tmp_path: Path) -> None:
    code = "from bench import origin; print(origin.command())"
    traces, inside = tmp_path / "traces", origin.ROOT / "docs" / "evaluation"
    done = subprocess.run(
        [sys.executable, "-c", code, "--data", str(traces), f"--out={inside}"],
        cwd=origin.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip().endswith("--data traces --out=docs/evaluation")
    assert str(tmp_path) not in done.stdout


def test_the_processor_is_named(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast 9000\nflags\t: x\n")
    assert origin.processor(info) == "Fast 9000"
    assert origin.processor(tmp_path / "none")
    assert " cores, Python 3." in origin.machine()


def test_the_rest_is_reckoned_from_what_parts_took_for_their_size() -> None:
    progress = Progress([1.0, 1.0, 4.0, 2.0])
    assert str(progress) == "0 of 4, nothing timed yet"
    progress.skipped(1.0)
    progress.took(60.0, 1.0)
    assert str(progress) == "2 of 4, about 6 min left"
    progress.took(120.0, 4.0)
    assert str(progress) == "3 of 4, about 72 s left"
    progress.took(60.0, 2.0)
    assert str(progress) == "4 of 4"
    slow = Progress([1.0, 10.0])
    slow.took(3600.0, 1.0)
    assert str(slow) == "1 of 2, about 10.0 h left"
