"""Compute slots: never more holders than slots, serving first, freed by death."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.replica.slots import Slots

HOLD = (
    "import sys; from pathlib import Path\n"
    "from services.replica.slots import Slots\n"
    "lease = Slots(Path(sys.argv[1]), int(sys.argv[2])).acquire(int(sys.argv[3]))\n"
    "print(lease.count, flush=True)\n"
    "sys.stdin.readline()\n"
)


def holder(folder: Path, count: int, wanted: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(count), str(wanted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def until(condition: object, what: str, seconds: float = 60.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_two_processes_together_hold_no_more_than_there_are(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 2)
    with holder(tmp_path, 2, 1) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        with slots.acquire(2) as lease:
            assert lease.count == 1
            assert slots.try_acquire(1) is None
        other.kill()
        other.communicate()


def test_a_killed_holder_frees_its_slots(tmp_path: Path) -> None:
    with holder(tmp_path, 2, 2) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "2\n"
        other.kill()
        other.communicate()
    with Slots(tmp_path, 2).acquire(2) as lease:
        assert lease.count == 2


def test_training_leaves_the_first_slot_to_serving(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 2)
    training = slots.try_acquire_training(2)
    assert training is not None
    assert training.count == 1
    with slots.acquire(2) as lease:
        assert lease.count == 1


def test_training_learns_that_serving_waits_and_gets_nothing_more(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 1)
    training = slots.try_acquire_training()
    assert training is not None
    assert not slots.inference_waits()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(slots.acquire(1).count))
    thread.start()
    until(slots.inference_waits, "nobody waits")
    training.release()
    thread.join(10)
    assert got == [1]
    assert not slots.inference_waits()


def test_a_busy_process_lets_the_waiting_one_in_at_its_next_turn(tmp_path: Path) -> None:
    """Fairness: without the gate the one that just released wins the race every time."""
    slots = Slots(tmp_path, 1)
    order: list[str] = []
    first = slots.acquire(1)

    def waiter() -> None:
        with slots.acquire(1):
            order.append("waiter")

    thread = threading.Thread(target=waiter)
    thread.start()
    until(slots.inference_waits, "nobody waits")
    # Give the waiter the gate before the busy side comes again.
    until(lambda: locked(tmp_path / "gate"), "the waiter does not stand at the gate")
    first.release()
    with slots.acquire(1):
        order.append("busy")
    thread.join(10)
    assert order == ["waiter", "busy"]


def test_no_slots_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Slots(tmp_path, 0)
