"""Where a replica computes, and a GPU's utilisation through NVML.

GPM's SM_UTIL (Hopper and later) says which share of the multiprocessors worked;
``utilization.gpu`` only says that some kernel ran. The sample names which of the two it is.
Written against NVML's documentation; it has not been run on a GPU yet.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """``device``: torch's name, "" for an emulated engine; ``gpu``: its UUID as NVML writes it."""

    device: str = ""
    gpu: str = ""


def place_of(engine: object) -> Place:
    """Where ``engine`` computes.

    The UUID names a GPU wherever it is looked at from: torch's index differs from NVML's under
    CUDA_VISIBLE_DEVICES, and every container calls its own GPU cuda:0.
    """
    device: Any = getattr(engine, "device", None)
    if device is None:
        return Place()
    if device.type != "cuda":
        return Place(str(device))
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Place(str(device), uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def open_meter(uuid: str) -> GpuMeter | None:
    """The meter of a GPU; None (logged) where NVML has none: utilisation is then estimated."""
    import pynvml

    try:
        return GpuMeter(uuid, pynvml)
    except pynvml.NVMLError as e:
        log.warning("NVML does not know %s (%s); utilisation is the share of steps", uuid, e)
        return None


class GpuMeter:
    """Utilisation of one device since the last call, 0 to 1."""

    def __init__(self, uuid: str, nvml: Any) -> None:
        """``nvml`` is the module pynvml. Raises its NVMLError: no driver or no such device."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._last: Any = self._sample() if self._has_gpm() else None
        self._failed = False

    def _has_gpm(self) -> bool:
        try:
            support = self._nvml.nvmlGpmQueryDeviceSupport(self._device)
        except self._nvml.NVMLError as e:
            log.info("no GPM metrics (%s): utilization.gpu is reported instead", e)
            return False
        return bool(support.isSupportedDevice)

    def _sample(self) -> Any:
        nvml, sample = self._nvml, self._nvml.nvmlGpmSampleAlloc()
        try:
            nvml.nvmlGpmSampleGet(self._device, sample)
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            raise
        return sample

    def read(self) -> tuple[float, str] | None:
        """(utilisation, source): source is ``sm_util`` or ``utilization.gpu``; None: no answer."""
        try:
            found = self._by_rate() if self._last is None else self._by_samples()
        except self._nvml.NVMLError as e:
            if not self._failed:
                log.warning("NVML gives no utilisation (%s); it is the share of steps", e)
            self._failed = True
            return None
        self._failed = False
        return found

    def _by_rate(self) -> tuple[float, str]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._device)
        return rates.gpu / 100, "utilization.gpu"

    def _by_samples(self) -> tuple[float, str]:
        nvml, sample = self._nvml, self._sample()
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        query.sample1, query.sample2 = self._last, sample
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        try:
            nvml.nvmlGpmMetricsGet(query)
        finally:
            nvml.nvmlGpmSampleFree(self._last)
            self._last = sample
        return query.metrics[0].value / 100, "sm_util"
