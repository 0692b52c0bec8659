"""Utilisation of an NVIDIA GPU through NVML: SM utilisation where the GPU reports it.

GPM's SM_UTIL (Hopper and later) says which share of the multiprocessors worked;
``utilization.gpu`` only says that some kernel ran. The sample names which of the two it is.
Written against NVML's documentation; it has not been run on a GPU yet.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


class GpuMeter:
    """Utilisation of one device since the last call, 0 to 1."""

    def __init__(self, index: int) -> None:
        """Raises pynvml.NVMLError without a driver or such a device."""
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._last: Any = self._sample() if self._has_gpm() else None

    def _has_gpm(self) -> bool:
        try:
            support = self._nvml.nvmlGpmQueryDeviceSupport(self._device)
        except self._nvml.NVMLError as e:
            log.info("no GPM metrics (%s): utilization.gpu is reported instead", e)
            return False
        return bool(support.isSupportedDevice)

    def _sample(self) -> Any:
        sample = self._nvml.nvmlGpmSampleAlloc()
        self._nvml.nvmlGpmSampleGet(self._device, sample)
        return sample

    def read(self) -> tuple[float, str]:
        """(utilisation, source): source is ``sm_util`` or ``utilization.gpu``."""
        nvml = self._nvml
        if self._last is None:
            return nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100, "utilization.gpu"
        sample = self._sample()
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        query.sample1, query.sample2 = self._last, sample
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(query)
        nvml.nvmlGpmSampleFree(self._last)
        self._last = sample
        return query.metrics[0].value / 100, "sm_util"


def device_index(device: str) -> int | None:
    """Index of a CUDA device name (``cuda`` = 0); None for another kind of device.

    It is torch's index: with CUDA_VISIBLE_DEVICES set, NVML counts differently, so containers
    and pods get one GPU each, which is 0 for both.
    """
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None
