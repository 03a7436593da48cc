"""Readings of an NVIDIA GPU that take more than one call of NVML: why its clocks are lowered, and how active its units are."""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

# 100 while the clocks are lowered, else 0, so that a mean is a share of the time; in all, and by cause.
THROTTLED = "device/throttled_pct"
THROTTLED_BY = {cause: f"device/throttled_{cause}_pct" for cause in ("power", "thermal", "hardware")}

SM_ACTIVITY = "device/sm_activity_pct"  # share of the multiprocessors that were busy; NVIDIA Hopper and later
TENSOR_ACTIVITY = "device/tensor_activity_pct"  # share of the time in which tensor cores computed; the same devices
DRAM_ACTIVITY = "device/dram_activity_pct"  # of the memory's highest bandwidth; the same devices
_COUNTERS = {
    SM_ACTIVITY: "NVML_GPM_METRIC_SM_UTIL",
    TENSOR_ACTIVITY: "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    DRAM_ACTIVITY: "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
MIN_GPM_SPAN_S = 0.1  # that NVML wants between two samples of its performance counters


class Throttling:
    """Whether the clocks are lowered at this moment, and why: the causes that the device can report.

    `power`: the power limit, or the power supply's brake. `thermal`: the temperature of the chip or of its memory.
    `hardware`: a slowdown by the hardware for which it gives neither as the reason. An idle device, and clocks that a
    user has set, are not throttled.
    """

    def __init__(self, nvml: Any, handle: Any):
        try:
            self._reasons(nvml, handle, "ClocksEvent")
        except (nvml.NVMLError, AttributeError):  # a driver or a binding from before 535
            self._reasons(nvml, handle, "ClocksThrottle")

    def _reasons(self, nvml: Any, handle: Any, name: str) -> None:
        supported = getattr(nvml, f"nvmlDeviceGetSupported{name}Reasons")(handle)
        self._read = partial(getattr(nvml, f"nvmlDeviceGetCurrent{name}Reasons"), handle)
        self._read()  # refused here rather than in the run

        def bits(*reasons: str) -> int:
            return supported & sum(getattr(nvml, f"nvml{name}Reason{reason}") for reason in reasons)

        causes = {
            "power": bits("SwPowerCap", "HwPowerBrakeSlowdown"),
            "thermal": bits("SwThermalSlowdown", "HwThermalSlowdown"),
        }
        self._bits = {cause: mask for cause, mask in causes.items() if mask}
        self._hardware = bits("HwSlowdown")

    def __call__(self) -> dict[str, float]:
        """100 or 0 for each cause that the device can report, and for all of them; empty if it can report none."""
        reasons = self._read()
        found = {cause: bool(reasons & mask) for cause, mask in self._bits.items()}
        if self._hardware:
            found["hardware"] = bool(reasons & self._hardware) and not any(found.values())
        readings = {THROTTLED_BY[cause]: 100.0 * throttled for cause, throttled in found.items()}
        return readings | ({THROTTLED: max(readings.values())} if readings else {})


class Activity:
    """The activity of a device's units between two calls, in %, by NVML's performance counters (GPM)."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float]):
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
