"""The control block: shared between processes, one writer a field."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from services.replica.control_block import BlockError, ControlBlock


def test_a_new_block_lets_nobody_train_and_has_endless_slack(tmp_path: Path) -> None:
    block = ControlBlock.create(tmp_path / "control.bin")
    assert not block.may_train()
    assert block.slack == math.inf
    assert block.has_slack(1e9)


def test_another_process_sees_what_was_written_and_answers(tmp_path: Path) -> None:
    block = ControlBlock.create(tmp_path / "control.bin")
    block.B, block.slack = 4, 0.25
    code = (
        "import sys; from pathlib import Path\n"
        "from services.replica.control_block import ControlBlock\n"
        "block = ControlBlock.open(Path(sys.argv[1]))\n"
        "assert block.may_train() and block.slack == 0.25\n"
        "block.micro_steps = 7\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(block.path)], check=True)
    assert block.micro_steps == 7


def test_draining_and_a_micro_batch_of_zero_stop_training(tmp_path: Path) -> None:
    block = ControlBlock.create(tmp_path / "control.bin")
    block.B = 2
    assert block.may_train()
    block.stopping = 1
    assert not block.may_train()
    block.stopping, block.B = 0, 0
    assert not block.may_train()


def test_no_two_fields_share_a_word_and_no_two_writers_a_cache_line() -> None:
    words = {
        name: field.word
        for name, field in vars(ControlBlock).items()
        if hasattr(field, "word") and name != "magic"
    }
    assert len(set(words.values())) == len(words)
    groups = {"inference": range(8, 32), "parent": range(32, 48), "training": range(48, 64)}
    assert all(any(w in g for g in groups.values()) for w in words.values())


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(4096)])
def test_a_file_that_is_no_block_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "control.bin"
    path.write_bytes(content)
    with pytest.raises(BlockError, match=r"control\.bin"):
        ControlBlock.open(path)
