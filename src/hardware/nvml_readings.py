"""Readings of an NVIDIA GPU or a MIG instance through NVML, which finds the device by its UUID.

torch.cuda has readings of its own for some of them. It counts devices as NVML does, in the order of the PCI bus, while CUDA
counts the fastest first: in a machine with two kinds of cards torch may read another one than the one that trains.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .devices import nvml_handle

UTILIZATION = "device/utilization_pct"  # share of a window of 1/6 to 1 s in which any kernel ran, however small
SM_CLOCK = "device/sm_clock_mhz"
POWER = "device/power_w"  # of the whole device; newer NVIDIA devices report the mean of the last second
ENERGY = "device/energy_j"  # a counter of the whole device that only grows; NVIDIA Volta and later

# 100 while the clocks are lowered, else 0, so that a mean is a share of the time.
THROTTLED = "device/throttled_pct"
# Why they are; not because the device idles, or because a user has set them.
_THROTTLING = ("SwPowerCap", "HwPowerBrakeSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwSlowdown")

SM_ACTIVITY = "device/sm_activity_pct"  # share of the multiprocessors that were busy; NVIDIA Hopper and later
TENSOR_ACTIVITY = "device/tensor_activity_pct"  # share of the time in which tensor cores computed; the same devices
DRAM_ACTIVITY = "device/dram_activity_pct"  # of the memory's highest bandwidth; the same devices
_COUNTERS = {
    SM_ACTIVITY: "NVML_GPM_METRIC_SM_UTIL",
    TENSOR_ACTIVITY: "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    DRAM_ACTIVITY: "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
MIN_GPM_SPAN_S = 0.1  # that NVML wants between two samples of its performance counters

Clock = Callable[[], float]
Query = Callable[[], float | Mapping[str, float] | None]


def nvml_device(device: torch.device) -> tuple[Any, Any]:
    """NVML, and its handle of a device.

    Raises:
        ImportError: without nvidia-ml-py.
        pynvml.NVMLError: without a driver, or for a device that NVML does not know.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml, nvml_handle(pynvml, device)


def nvidia_queries(device: torch.device, clock: Clock) -> dict[str, Query]:
    """What can be read of a device, by key. Raises as `nvml_device` does."""
    nvml, handle = nvml_device(device)
    queries: dict[str, Query] = {
        UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        ENERGY: lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
        SM_CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    }
    # An older binding does not know these, and an older driver or device, or a MIG instance, does not offer them.
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        reasons = sum(getattr(nvml, f"nvmlClocksEventReason{reason}") for reason in _THROTTLING)
        if reasons := reasons & nvml.nvmlDeviceGetSupportedClocksEventReasons(handle):
            queries[THROTTLED] = lambda: 100.0 * bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & reasons)
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            queries[SM_ACTIVITY] = Activity(nvml, handle, clock)
    return queries


class Activity:
    """The activity of a device's units between two calls, in %, by NVML's performance counters (GPM)."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock):
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._earlier, self._later = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        for sample in (self._earlier, self._later):
            finalizer: Any = weakref.finalize(self, _free, nvml, sample)
            finalizer.atexit = False
        self._keys = [key for key, name in _COUNTERS.items() if hasattr(nvml, name)]
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version, self._request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(self._keys)
        for metric, key in zip(self._request.metrics, self._keys, strict=False):
            metric.metricId = getattr(nvml, _COUNTERS[key])
        self._taken: float | None = None

    def __call__(self) -> dict[str, float]:
        """Since the last call; empty at the first call and after too short a time."""
        before, now = self._taken, self._clock()
        self._taken = now
        self._earlier, self._later = self._later, self._earlier
        self._nvml.nvmlGpmSampleGet(self._handle, self._later)
        if before is None or now - before < MIN_GPM_SPAN_S:
            return {}
        self._request.sample1, self._request.sample2 = self._earlier, self._later
        self._nvml.nvmlGpmMetricsGet(self._request)
        found = zip(self._keys, self._request.metrics, strict=False)
        return {key: metric.value for key, metric in found if metric.nvmlReturn == 0}


def _free(nvml: Any, sample: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):  # of a device that was lost
        nvml.nvmlGpmSampleFree(sample)
