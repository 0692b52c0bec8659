"""The pacing bench's own arithmetic, and the simulation of a real run's requests."""

from __future__ import annotations

import argparse

import pytest

from bench.pacing import binned, coarser, dispersion, fullest
from bench.validity import simulated


def test_an_even_replica_has_no_dispersion_and_the_median_replica_is_told() -> None:
    assert dispersion([[2.0, 2.0, 2.0]]) == 0.0
    assert dispersion([[0.0, 2.0], [1.0, 1.0], [0.0, 4.0], [0.0, 0.0]]) == 1.0
    assert dispersion([]) is None
    assert fullest([[0.0, 2.0], [3.0, 3.0]]) == 0.0, "the second ended most"
    assert fullest([]) is None
    assert fullest([[0.0, 0.0]]) is None


def test_ends_are_counted_from_the_first_of_all_replicas() -> None:
    rows = binned({"a": [10.0, 10.4, 12.1], "b": [11.0]}, 1.0)
    assert rows == [[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


def test_bins_of_a_slowed_cluster_are_joined_to_its_own_seconds() -> None:
    assert coarser([[1.0, 2.0, 3.0, 4.0, 9.0], []], 2) == [[3.0, 7.0], []]
    assert coarser([[1.0, 2.0]], 1) == [[1.0, 2.0]]


@pytest.mark.parametrize("policy", ["round_robin", "collm"])
def test_a_real_runs_requests_keep_their_task_and_its_limits(policy: str) -> None:
    real = {
        "requests": [
            {"sent": 0.5 * k, "tag": tag, "input_tokens": 100, "asked_prompt": 90,
             "asked_output": output}
            for k, (tag, output) in enumerate([("code", 10), ("conv", 60)] * 5)
        ]
    }  # fmt: skip
    options = argparse.Namespace(
        profile="h20-8b", replicas=2, slo=["code/e2el:5000", "conv/e2el:100"]
    )
    result = simulated(real, policy, options)
    assert result["tags"]["code"]["slo_attainment"] == 1.0
    assert result["tags"]["conv"]["slo_attainment"] == 0.0, "60 tokens take longer than 0.1 s"
    assert result["total_input_tokens"] == 1000
