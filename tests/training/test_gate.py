"""The gate of the training process: how many slots it holds, and when."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from services.replica.control_block import ControlBlock
from services.replica.slots import Slots
from services.replica.training.gate import ServingGate


@pytest.fixture
def block(tmp_path: Path) -> ControlBlock:
    made = ControlBlock.create(tmp_path / "control.bin")
    made.B, made.slack = 2, float("inf")
    return made


def test_a_micro_step_takes_the_slots_that_serving_leaves(
    block: ControlBlock, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    slots = Slots(tmp_path / "slots", 2)
    gate = ServingGate(block, slots, lambda: None)
    try:
        block.running = 1
        gate.before_micro_step(2)
        assert torch.get_num_threads() == 1
        block.running = 0
        with slots.acquire(1):  # another replica of the host computes
            gate.inside()
            assert torch.get_num_threads() == 1
        gate.inside()
        assert torch.get_num_threads() == 2
        assert slots.try_acquire(1) is None
        block.running = 1
        gate.inside()
        assert torch.get_num_threads() == 1
        with slots.acquire(2) as lease:
            assert lease.count == 1
        gate.after_micro_step(0.1, 2, 10)
        with slots.acquire(2) as lease:
            assert lease.count == 2
    finally:
        gate.release()
        torch.set_num_threads(threads)


def test_what_training_held_and_how_long_it_waited_is_counted(
    block: ControlBlock, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    slots = Slots(tmp_path / "slots", 2)
    gate = ServingGate(block, slots, lambda: None)
    try:
        gate.before_micro_step(2)
        time.sleep(0.05)
        gate.after_micro_step(0.05, 2, 10)
        assert block.train_slot_seconds >= 0.1  # two slots
        held = block.train_slot_seconds
        waited = block.train_wait_seconds
        block.B = 0
        timer = threading.Timer(0.05, setattr, (block, "B", 2))
        timer.start()
        gate.before_micro_step(2)
        timer.join()
        assert block.train_wait_seconds - waited >= 0.04
        assert block.train_slot_seconds == held  # waiting holds none
    finally:
        gate.release()
        torch.set_num_threads(threads)
