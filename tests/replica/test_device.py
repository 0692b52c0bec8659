"""Where a replica computes: the device that is named, what is told of it, how it is limited."""

from __future__ import annotations

import os
from collections import deque
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest
import torch

from services.replica import gpu, lane, trainer_child
from services.replica.checkpoint import WeightsError
from services.replica.settings import ReplicaSettings
from services.replica.trainer_child import TrainerChild, environment
from services.replica.training.config import WorkerConfig
from services.replica.weights import resolve_device, resolve_dtype
from shared import mps

UUID = "GPU-8f5cdd3a-1d2e-4f60-9a41-0c5c3f0b7e11"


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


@pytest.mark.parametrize("raw", [UUID, UUID.removeprefix("GPU-")])
def test_a_gpu_is_told_by_its_uuid(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has written it with and without the prefix; NVML wants it with."""
    found = SimpleNamespace(uuid=raw)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    engine = SimpleNamespace(device=torch.device("cuda:1"))
    assert gpu.place_of(engine) == gpu.Place("cuda:1", UUID)
    assert gpu.place_of(SimpleNamespace(device=torch.device("cpu"))) == gpu.Place("cpu")
    assert gpu.place_of(SimpleNamespace()) == gpu.Place()  # an emulated engine


# ---------------------------------------------------------------- NVML


class NvmlError(Exception):
    pass


class Nvml:
    """What the meter uses of pynvml, for one GPU."""

    NVMLError = NvmlError
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_SM_UTIL = 1, 2

    def __init__(self, *, gpm: bool = True) -> None:
        self._gpm = gpm
        self.broken = False
        self.utilisation = deque((25.0, 75.0, 50.0))
        self.samples: set[int] = set()
        self._taken = 0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != UUID:
            raise NvmlError("Not Found")
        return uuid

    def nvmlGpmQueryDeviceSupport(self, device: str) -> Any:  # noqa: N802
        return SimpleNamespace(isSupportedDevice=int(self._gpm))

    def nvmlGpmSampleAlloc(self) -> int:  # noqa: N802
        self._taken += 1
        self.samples.add(self._taken)
        return self._taken

    def nvmlGpmSampleGet(self, device: str, sample: int) -> None:  # noqa: N802
        if self.broken:
            raise NvmlError("GPU is lost")
        assert sample in self.samples

    def nvmlGpmSampleFree(self, sample: int) -> None:  # noqa: N802
        self.samples.remove(sample)

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802
        return SimpleNamespace(metrics=[SimpleNamespace()])

    def nvmlGpmMetricsGet(self, query: Any) -> None:  # noqa: N802
        assert (query.version, query.numMetrics, query.metrics[0].metricId) == (1, 1, 2)
        assert query.sample1 < query.sample2
        assert {query.sample1, query.sample2} <= self.samples
        query.metrics[0].value = self.utilisation.popleft()

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:  # noqa: N802
        if self.broken:
            raise NvmlError("GPU is lost")
        return SimpleNamespace(gpu=self.utilisation.popleft())


def test_sm_utilisation_is_taken_between_two_looks() -> None:
    nvml = Nvml()
    meter = gpu.GpuMeter(UUID, nvml)
    assert [meter.read() for _ in range(3)] == [(x, "sm_util") for x in (0.25, 0.75, 0.5)]
    assert len(nvml.samples) == 1  # the last one, for the next look


def test_a_gpu_without_gpm_tells_the_coarser_number_and_says_so() -> None:
    assert gpu.GpuMeter(UUID, Nvml(gpm=False)).read() == (0.25, "utilization.gpu")


@pytest.mark.parametrize("gpm", [True, False])
def test_a_gpu_that_fails_gives_no_number_until_it_is_back(
    gpm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = Nvml(gpm=gpm)
    meter = gpu.GpuMeter(UUID, nvml)
    nvml.broken = True
    assert meter.read() is None
    assert meter.read() is None
    assert caplog.text.count("GPU is lost") == 1
    nvml.broken = False
    assert meter.read() is not None
    assert len(nvml.samples) <= 1  # those of the failed looks are freed


def test_a_replica_serves_without_nvml(caplog: pytest.LogCaptureFixture) -> None:
    """Here there is no driver at all."""
    assert gpu.open_meter(UUID) is None
    assert f"NVML does not know {UUID}" in caplog.text


# ---------------------------------------------------------------- MPS, streams


def test_training_is_limited_where_an_mps_daemon_runs(tmp_path: Path) -> None:
    outside = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    settings = ReplicaSettings.model_validate({"model_path": "m", "training_gpu_percent": 30})
    assert mps.PERCENTAGE not in environment(settings, outside)
    (tmp_path / "control").touch()
    given = environment(settings, outside)
    assert given[mps.PERCENTAGE] == "30"
    assert given[mps.PRIORITY] == mps.BELOW_NORMAL
    own = environment(settings, {**outside, mps.PERCENTAGE: "10"})
    assert own[mps.PERCENTAGE] == "10"  # the operator's word counts


def test_the_default_folder_is_nvidias() -> None:
    assert mps.folder({}) == mps.folder({"CUDA_MPS_PIPE_DIRECTORY": ""}) == Path("/tmp/nvidia-mps")


async def test_only_a_training_process_on_a_gpu_gets_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    settings = ReplicaSettings.model_validate(
        {"model_path": "m", "data_dir": tmp_path, "metrics_kept": 500}
    )
    on_gpu = {
        "type": "cuda", "file": "f", "dtype": "bfloat16", "index": 0, "memory": "", "size": 0,
        "offset": 0, "counter": "", "counter_offset": 0, "event": "", "event_wait": False,
    }  # fmt: skip

    async def share() -> None:
        return None

    child = TrainerChild(settings, {}, share)
    text = child._config(on_gpu)
    config = msgspec.json.decode(text, type=WorkerConfig)
    assert config.weights is not None
    assert config.weights.device == "cuda:0"
    assert config.environment[mps.PERCENTAGE] == "40"
    assert config.metrics_kept == 500
    assert orjson.loads(child._config(None))["environment"] == {}

    seen: dict[str, str | None] = {}
    monkeypatch.setattr(
        "services.replica.training.worker.main",
        lambda config, pipe: seen.update(percent=os.environ.get(mps.PERCENTAGE)),
    )
    monkeypatch.setattr(os, "environ", dict(os.environ))
    trainer_child.run(text, Pipe()[0])
    assert seen == {"percent": "40"}


def test_serving_and_training_have_streams_of_their_own_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append(priority))
    lane.Lane(torch.device("cuda:0"), urgent=True)
    lane.Lane(torch.device("cuda:0"), urgent=False)
    assert made[0] < made[1]  # CUDA: the lower number goes first
    with lane.Lane(torch.device("cpu"), urgent=True)():
        assert len(made) == 2


def test_training_stays_two_layers_before_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            Event.made += 1
            self.number = Event.made

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            waited.append(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    queue = lane.ShortQueue(torch.device("cuda:0"))
    for _ in range(5):
        queue.passed()
    assert waited == [1, 2, 3]
    lane.ShortQueue(torch.device("cpu")).passed()
    assert Event.made == 5
