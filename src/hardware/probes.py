"""Probes: what can be read of the training device and of the process, a few times a second.

A reading that the device does not offer is left out, never 0. A query that the driver refuses is dropped at its first
failure, with one warning a process. No probe raises into the training.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import psutil
import torch

from .devices import nvml_handle
from .nvml_readings import SM_ACTIVITY, THROTTLED, Activity, Throttling
from .processor import usable_cores

UTILIZATION = (
    "device/utilization_pct"  # of a GPU: share of a window of 1/6 to 1 s in which any kernel ran, however small
)
SM_CLOCK = "device/sm_clock_mhz"  # NVIDIA
# Of a CPU as the training device: processor time of the process and its children, of that of the usable cores.
PROCESSOR_TIME = "device/processor_time_pct"
POWER = "device/power_w"  # of the whole device; newer NVIDIA devices report the mean of the last second
ENERGY = "device/energy_j"  # a counter of the whole device that only grows; NVIDIA Volta and later
CPU = "host/cpu_pct"  # of the process; 100 is one core fully busy
RSS = "host/rss_gib"  # memory of the process that is in RAM

MIN_SPAN_S = 0.05  # CPU times of other processes tick at 10 ms: a rate over less time is mostly rounding
CHILDREN_EVERY_S = 2.0
MAX_WATTS = 2000  # see AmdProbe
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
_GIB = 2**30

Clock = Callable[[], float]
Query = Callable[[], float | Mapping[str, float] | None]
_warned: set[str] = set()


class Probe(Protocol):
    """Something that can be read a few times a second."""

    def read(self) -> dict[str, float]:
        """What can be read now; rates are over the time since the last read."""
        ...


def probes_for(device: torch.device) -> list[Probe]:
    """The probes of a training device and of this process; never raises."""
    probes: list[Probe] = [ProcessProbe()]
    if device.type == "cpu":
        probes.append(CpuProbe())
    elif device.type == "cuda" and torch.version.hip:
        probes.append(AmdProbe(device))
    elif device.type == "cuda":
        try:
            probes.append(NvidiaProbe(device))
        except Exception as error:  # noqa: BLE001 - a library or a driver that is missing or broken in its own way
            warn_once("nvml", f"no readings of {device}, NVML is not available: {reason(error)}")
    return probes


def warn_once(kind: str, message: str) -> None:
    """Warn once a process for each kind. Where warnings are errors, say nothing: a measurement must not end a run."""
    if kind not in _warned:
        _warned.add(kind)
        with contextlib.suppress(Warning):
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def reason(error: Exception) -> str:
    """An error in a few words."""
    return str(error) or type(error).__name__


class QueryProbe:
    """Queries by key. A query returns a reading, or several by their own keys, or None for no reading this time.

    One that fails is not asked again.
    """

    def __init__(self, queries: Mapping[str, Query]):
        self._queries = dict(queries)

    def read(self) -> dict[str, float]:
        """The readings of the remaining queries; none once the device is lost."""
        readings = {}
        for key, query in list(self._queries.items()):
            try:
                value = query()
                if isinstance(value, Mapping):
                    readings |= value
                elif value is not None:
                    readings[key] = float(value)
            except Exception as error:  # noqa: BLE001 - every library has its own, and none may end a run
                if getattr(error, "value", None) in _LOST:
                    self._queries.clear()
                    warn_once("lost", f"the device no longer answers ({error}): its readings end here")
                    return {}
                del self._queries[key]
                warn_once(key, f"{key} is left out: {reason(error)}")
        return readings


class NvidiaProbe(QueryProbe):
    """An NVIDIA GPU or a MIG instance, through NVML.

    Raises:
        ImportError: without nvidia-ml-py.
        pynvml.NVMLError: without a driver, or for a device that NVML does not know.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter):
        import pynvml

        nvml: Any = pynvml
        nvml.nvmlInit()
        handle = nvml_handle(nvml, device)
        super().__init__(
            {
                UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                ENERGY: lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            }
        )
        # An older binding does not know these, and an older driver or device, or a MIG instance, does not offer them.
        unknown = (nvml.NVMLError, AttributeError)
        with contextlib.suppress(*unknown):
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            self._queries[SM_CLOCK] = lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        with contextlib.suppress(*unknown):
            self._queries[THROTTLED] = Throttling(nvml, handle)
        with contextlib.suppress(*unknown):
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._queries[SM_ACTIVITY] = Activity(nvml, handle, clock)


class AmdProbe(QueryProbe):
    """An AMD GPU, through torch, which reads AMD's library and returns 0 for an unknown power.

    torch documents the power in mW, and its releases so far return W. No GPU draws more than 2 kW, so a larger number
    is in mW.
    """

    def __init__(self, device: torch.device):
        def power() -> float | None:
            reading = torch.cuda.power_draw(device)
            return (reading / 1000 if reading > MAX_WATTS else reading) or None

        super().__init__({UTILIZATION: lambda: torch.cuda.utilization(device), POWER: power})


class ProcessProbe(QueryProbe):
    """The training process: its CPU use and its memory."""

    def __init__(self, clock: Clock = time.perf_counter):
        process = psutil.Process()
        busy = _CpuPercent(time.process_time, clock)
        super().__init__({CPU: busy, RSS: lambda: process.memory_info().rss / _GIB})


class CpuProbe(QueryProbe):
    """The CPU as the training device: the processor time of the process and its children, in % of the usable cores'.

    Children are looked up every 2 s, or less often where that takes long. The CPU time of a child before it is first
    seen and after it is last seen is not counted.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        self._clock = clock
        self._process = psutil.Process()
        self._children: dict[psutil.Process, float] = {}
        self._of_children = 0.0  # CPU seconds
        self._look_at = -float("inf")
        self._busy = _CpuPercent(self._cpu_seconds, clock, usable_cores())
        super().__init__({PROCESSOR_TIME: self._processor_time})

    def _processor_time(self) -> float | None:
        busy = self._busy()
        return None if busy is None else min(busy, 100.0)  # clocks that tick differently may show a little more

    def _cpu_seconds(self) -> float:
        """Of this process, and of its children as far as they are known."""
        for child, before in list(self._children.items()):
            try:
                self._children[child] = cpu_seconds_of(child)
                self._of_children += self._children[child] - before
            except psutil.Error:
                del self._children[child]
        now = self._clock()
        if now >= self._look_at:
            started = time.perf_counter()
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self._children.setdefault(child, cpu_seconds_of(child))
            # This reads the whole process table, which may take one part in 500 of the time.
            self._look_at = now + max(CHILDREN_EVERY_S, 500 * (time.perf_counter() - started))
        return time.process_time() + self._of_children


class _CpuPercent:
    """CPU seconds between two calls, in % of so many cores; None at the first call and after too short a time."""

    def __init__(self, cpu_seconds: Callable[[], float], clock: Clock, cores: float = 1.0):
        self._cpu_seconds, self._clock, self._cores = cpu_seconds, clock, cores
        self._seen: tuple[float, float] | None = None

    def __call__(self) -> float | None:
        before, self._seen = self._seen, (self._clock(), self._cpu_seconds())
        if before is None or self._seen[0] - before[0] < MIN_SPAN_S:
            return None
        return 100 * (self._seen[1] - before[1]) / (self._seen[0] - before[0]) / self._cores


def cpu_seconds_of(process: psutil.Process) -> float:
    """CPU seconds that a process has used."""
    times = process.cpu_times()
    return times.user + times.system
