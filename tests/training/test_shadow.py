"""The shadow adapter: whole versions or none, across real processes."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from services.replica.shadow import Card, ShadowError, ShadowReader, ShadowWriter


def card(version: str, size: int) -> Card:
    return Card(
        name="a",
        version=version,
        rank=1,
        lora_alpha=1.0,
        tensors={"x": (0, size - 1, (size - 1,)), "y": (size - 1, size, (1,))},
    )


def publish_many(path: str, size: int, count: int, ready: Connection) -> None:
    writer = ShadowWriter(Path(path), size * 4)
    ready.send(True)
    ready.recv()
    for i in range(1, count + 1):
        writer.publish(card(str(i), size), np.full(size, i, dtype=np.float32))
    ready.send(True)


def test_a_reader_gets_each_new_version_once(tmp_path: Path) -> None:
    writer, reader = ShadowWriter(tmp_path / "s", 64), ShadowReader(tmp_path / "s")
    assert reader.poll() == []
    writer.publish(card("1", 4), np.arange(4, dtype=np.float32))
    [found] = reader.poll()
    assert (found.name, found.version) == ("a", "1")
    assert found.tensors["x"].tolist() == [0, 1, 2]
    assert found.tensors["y"].tolist() == [3]
    assert reader.poll() == []
    writer.publish(card("2", 4), np.ones(4, dtype=np.float32))
    writer.publish(card("3", 4), np.zeros(4, dtype=np.float32))
    assert [p.version for p in reader.poll()] == ["3"]
    assert found.tensors["x"].tolist() == [0, 1, 2]  # a copy of its own


def test_a_larger_version_gets_a_larger_file(tmp_path: Path) -> None:
    writer, reader = ShadowWriter(tmp_path / "s", 64), ShadowReader(tmp_path / "s", verify=True)
    writer.publish(card("1", 4), np.zeros(4, dtype=np.float32))
    assert len(reader.poll()) == 1
    writer.publish(card("2", 100_000), np.full(100_000, 7, dtype=np.float32))
    [found] = reader.poll()
    assert found.version == "2"
    assert float(found.tensors["x"].sum()) == 7 * 99_999
    writer.close()
    again = ShadowWriter(tmp_path / "s", 64)
    again.publish(card("3", 4), np.zeros(4, dtype=np.float32))
    assert [p.version for p in reader.poll()] == ["3"]


def test_a_restarted_reader_can_skip_what_is_there(tmp_path: Path) -> None:
    writer = ShadowWriter(tmp_path / "s", 64)
    writer.publish(card("1", 4), np.zeros(4, dtype=np.float32))
    reader = ShadowReader(tmp_path / "s")
    reader.skip()
    assert reader.poll() == []


def test_a_file_that_is_no_shadow_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"x" * 10_000)
    with pytest.raises(ShadowError, match="no shadow"):
        ShadowWriter(tmp_path / "s", 64)


def test_no_read_is_ever_torn(tmp_path: Path) -> None:
    """A writer in another process as fast as it can; each accepted copy is of one version."""
    size, count = 20_000, 4000
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=publish_many, args=(str(tmp_path / "s"), size, count, theirs), daemon=True
    )
    process.start()
    assert ours.poll(60)
    ours.recv()
    reader = ShadowReader(tmp_path / "s")
    ours.send(True)
    last, accepted = 0, 0
    while last < count:
        for found in reader.poll():
            whole = torch.cat([found.tensors["x"], found.tensors["y"]])
            assert bool((whole == float(found.version)).all()), f"torn: {found.version}"
            assert int(found.version) > last
            last, accepted = int(found.version), accepted + 1
        assert process.is_alive() or last == count or ours.poll(0)
    process.join(20)
    assert process.exitcode == 0
    assert accepted > 10
