"""Which way updates travel, for every kind of membership."""

from __future__ import annotations

import pytest

from services.coordinator.paths import choose_backend, choose_path
from shared.records import ReplicaRecord

LIMIT = 1000


def on(*places: tuple[str, str, str]) -> list[ReplicaRecord]:
    """Members as (host, device, UUID of the GPU)."""
    return [ReplicaRecord(host=h, device=d, gpu=g) for h, d, g in places]


OWN = on(("a", "cuda:0", "GPU-1"), ("a", "cuda:1", "GPU-2"), ("b", "cuda:0", "GPU-3"))
SHARED = on(("pod-1", "cuda:0", "GPU-1"), ("pod-2", "cuda:0", "GPU-1"))
MIXED = on(("a", "cuda:0", "GPU-1"), ("b", "cpu", ""))
PROCESSORS = on(("a", "cpu", ""), ("b", "cpu", ""))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (OWN, "nccl"),
        (SHARED, "gloo"),  # two containers on one GPU: NCCL would refuse
        (MIXED, "gloo"),
        (PROCESSORS, "gloo"),
        (on(("a", "", ""), ("b", "", "")), "gloo"),
        (on(("a", "cuda:0", ""), ("b", "cuda:0", "")), "gloo"),  # which GPUs is not known
        ([*OWN, ReplicaRecord(id="gone")], "gloo"),
        (OWN[:1], "gloo"),  # nobody to talk to
    ],
)
def test_nccl_needs_a_gpu_of_its_own_for_every_member(
    members: list[ReplicaRecord], expected: str
) -> None:
    assert choose_backend(members) == expected


@pytest.mark.parametrize(
    ("wanted", "size", "expected"),
    [
        ("auto", LIMIT - 1, "redis"),
        ("auto", LIMIT, "group"),
        ("auto", 0, "redis"),
        ("redis", 10 * LIMIT, "redis"),
        ("group", 0, "group"),
    ],
)
def test_large_updates_take_a_group_unless_the_setting_says_otherwise(
    wanted: str, size: int, expected: str
) -> None:
    assert choose_path(wanted, size, LIMIT) == expected
