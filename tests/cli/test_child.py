"""A child process is kept alive, stopped in time, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from collm.up.child import Child, GivenUp

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
DEAF += "time.sleep(600)"


def _child(
    tmp_path: Path, code: str, told: list[str], restarts: int = 3, may_leave: bool = False
) -> Child:
    return Child(
        "one",
        [sys.executable, "-c", code],
        tmp_path / "logs" / "one.log",
        {},
        tell=told.append,
        restarts=restarts,
        started=lambda: None,
        may_leave=may_leave,
    )


async def _until_up(child: Child, times: int = 1) -> None:
    end = time.monotonic() + 60
    while not child.log.exists() or child.log.read_text().count("up") < times:
        assert time.monotonic() < end, f"{child.log} does not say it is up"
        await asyncio.sleep(0.02)


async def test_a_killed_child_is_restarted_and_said_so(tmp_path: Path) -> None:
    told: list[str] = []
    child = _child(tmp_path, SLEEPER, told)
    await child.start()
    keeper = asyncio.create_task(child.keep())
    await _until_up(child)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await _until_up(child, times=2)
    assert child.pid not in (None, first)
    assert "one died (signal SIGKILL)" in told[0]
    await child.stop(5.0)
    await keeper
    assert child.pid is None


async def test_a_child_that_dies_at_once_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    child = _child(tmp_path, "print('no config'); raise SystemExit(3)", [], restarts=1)
    await child.start()
    with pytest.raises(GivenUp, match=r"(?s)2 times in a row, last exit code 3.*no config"):
        await child.keep()


async def test_a_deaf_child_is_killed_after_the_patience_is_over(tmp_path: Path) -> None:
    told: list[str] = []
    child = _child(tmp_path, DEAF, told)
    await child.start()
    keeper = asyncio.create_task(child.keep())
    await _until_up(child)
    await child.stop(0.2)
    await keeper
    assert child.pid is None
    assert "did not stop within" in told[0]


async def test_a_stopped_child_is_not_restarted(tmp_path: Path) -> None:
    told: list[str] = []
    child = _child(tmp_path, SLEEPER, told)
    await child.start()
    keeper = asyncio.create_task(child.keep())
    await _until_up(child)
    await child.stop(5.0)
    await asyncio.wait_for(keeper, 5.0)
    assert told == []


async def test_a_child_that_left_can_be_started_again(tmp_path: Path) -> None:
    told: list[str] = []
    child = _child(tmp_path, "print('up')", told, may_leave=True)
    await child.start()
    await child.keep()
    assert told == ["one has drained and stays away; `collm undrain one` starts it again"]
    await child.revive()
    await child.keep()
    assert child.log.read_text() == "up\nup\n"
    await child.stop(5.0)
    await child.revive()
    assert child.pid is None, "what was stopped stays so"


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from collm.up.child import Child\n"
        "async def main():\n"
        "    c = Child('one', [sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        f"        Path({str(tmp_path)!r}) / 'log', {{}}, tell=print, restarts=0,\n"
        "        started=lambda: None)\n"
        "    await c.start(); print(c.pid, flush=True); await c.keep()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < end:
        os.sched_yield()
    assert not psutil.pid_exists(pid)


async def test_a_child_that_refuses_its_settings_is_not_tried_again(tmp_path: Path) -> None:
    told: list[str] = []
    child = _child(tmp_path, "print('--port: too high'); raise SystemExit(2)", told)
    await child.start()
    with pytest.raises(GivenUp, match=r"(?s)refuses its settings.*--port: too high"):
        await child.keep()
    assert told == []
