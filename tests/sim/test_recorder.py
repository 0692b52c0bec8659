"""What a simulation's series tell: shares of replicas' time, on one axis of time."""

from __future__ import annotations

import pytest

from sim.recorder import MAX_BUSY_ROWS, Recorder


def test_a_replica_that_is_busy_twice_at_one_moment_is_seen() -> None:
    recorder = Recorder(["a", "b"])
    recorder.busy.spread(recorder.row_of["a"], 0.0, 4.0)
    recorder.busy.spread(recorder.row_of["b"], 0.0, 4.0)
    recorder.busy.spread(recorder.row_of["b"], 2.0, 3.5)
    busy = recorder.by_time()["utilisation"]
    assert busy[0][:4] == [1.0] * 4
    assert busy[1][:4] == [1.0, 1.0, 2.0, 1.5]


def test_replicas_that_share_a_row_are_counted_row_by_row() -> None:
    """300 in 256 rows: some rows are of one, some of two; each is full when all of it is busy."""
    names = [f"r{k}" for k in range(300)]
    recorder = Recorder(names)
    for name in names:
        recorder.busy.spread(recorder.row_of[name], 0.0, 2.0)
        recorder.training.add(recorder.row_of[name], 0.5, 0.5)
    found = recorder.by_time()
    assert len(found["utilisation"]) == MAX_BUSY_ROWS
    assert all(row[:2] == [1.0, 1.0] for row in found["utilisation"])
    assert all(row[0] == 0.5 for row in found["training"])


def test_training_that_ended_early_keeps_its_place_beside_a_long_run() -> None:
    """A run of 3,000 s has wider buckets than its first 1,000 s; all are told in the widest."""
    recorder = Recorder(["a"])
    row = recorder.row_of["a"]
    for second in range(1000):
        recorder.training.add(row, second + 0.5, 0.25)
    recorder.served.add(row, 10.0, 1)
    recorder.busy.spread(row, 2999.0, 3000.0)
    found = recorder.by_time()
    width = found["utilisation_bucket_seconds"]
    assert width == 4.0
    training = found["training"][0]
    assert training[:250] == pytest.approx([0.25] * 250)
    assert not any(training[250:])
    assert found["served"][0][2] == 1
    assert {len(found[name][0]) for name in ("utilisation", "training", "served")} == {751}
