"""Which device a replica takes: the one that is named, or none at all."""

from __future__ import annotations

import pytest
import torch

from services.replica.checkpoint import WeightsError
from services.replica.gpu import device_index
from services.replica.weights import resolve_device, resolve_dtype


def test_a_named_cpu_is_taken_even_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_dtype("auto", "cpu") is torch.float32
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_dtype("auto", "cuda:1") is torch.bfloat16


@pytest.mark.parametrize("device", ["cuda:7", "gpu", "meta"])
def test_a_device_that_is_not_there_is_told(device: str) -> None:
    with pytest.raises(WeightsError, match=f"device '{device}'"):
        resolve_device(device)


def test_the_index_is_that_of_the_name() -> None:
    assert [device_index(d) for d in ("cpu", "cuda", "cuda:3")] == [None, 0, 3]
