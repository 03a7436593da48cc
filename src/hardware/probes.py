"""Probes: what can be read of the training device and of the process, a few times a second.

A reading that the device does not offer is left out, never 0. A query that is refused is dropped at its first failure, with
a warning. No probe raises into the training.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping

import psutil
import torch

from .device_memory import memory_of
from .nvml_readings import UTILIZATION, Clock, Query, gpu_queries
from .processor import own_seconds, usable_cores

# Of a CPU as the training device: processor time of the process and its children, of that of the usable cores.
PROCESSOR_TIME = "device/processor_time_pct"
CPU = "host/cpu_pct"  # of the process; 100 is one core fully busy
RSS = "host/rss_gib"  # memory of the process that is in RAM

SETTLE_S = 2.1  # NVML's utilisation is of the last complete window, which took 1/6 to 1 s and began up to 2 s ago
ALLOCATED = "device/memory_allocated_gib"
PEAK = "device/memory_peak_gib"

MIN_SPAN_S = 0.05  # CPU times of other processes tick at 10 ms: a rate over less time is mostly rounding
_GIB = 2**30


class Probe:
    """Queries by key. A query returns a reading, or several by their own keys, or None for no reading this time."""

    def __init__(self, queries: Mapping[str, Query]):
        self._queries = dict(queries)

    def read(self) -> dict[str, float]:
        """The readings of the remaining queries; rates are over the time since the last read."""
        readings = {}
        for key, query in list(self._queries.items()):
            try:
                value = query()
                if isinstance(value, Mapping):
                    readings |= value
                elif value is not None:
                    readings[key] = float(value)
            except Exception as error:  # noqa: BLE001 - every library has its own, and none may end a run
                del self._queries[key]
                _warn(f"{key} is left out: {error or type(error).__name__}")
        return readings


def probe_for(device: torch.device, clock: Clock = time.perf_counter, settle_s: float = 0.0) -> Probe:
    """All that can be read of a training device and of this process; never raises.

    A GPU's utilisation, which is of a time before, is read after `settle_s` seconds.
    """
    process = psutil.Process()
    queries: dict[str, Query] = {
        CPU: _BusyPercent(time.process_time, clock),
        RSS: lambda: process.memory_info().rss / _GIB,
        ALLOCATED: _memory_query(device),
    }
    if device.type == "cpu":
        queries[PROCESSOR_TIME] = _BusyPercent(own_seconds, clock, usable_cores())
    elif device.type == "cuda":
        try:
            queries |= gpu_queries(device)
        except Exception as error:  # noqa: BLE001 - a library or a driver that is missing or broken in its own way
            _warn(f"no readings of {device}, NVML is not available: {error or type(error).__name__}")
    if UTILIZATION in queries:
        utilization, settled = queries[UTILIZATION], clock() + settle_s
        queries[UTILIZATION] = lambda: utilization() if clock() >= settled else None
    return Probe(queries)


def _memory_query(device: torch.device) -> Query:
    """The memory that training holds, and its peak since now; on CUDA the allocator's own, else of the readings."""
    peak = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def query() -> dict[str, float]:
        nonlocal peak
        if (told := memory_of(device)) is None:
            return {}
        peak = max(peak, told[1])
        return {ALLOCATED: told[0] / _GIB, PEAK: peak / _GIB}

    return query


class _BusyPercent:
    """CPU seconds between two calls, in % of so many cores; None at the first call and after too short a time.

    Of more cores than one it is at most 100: clocks that tick differently may show a little more.
    """

    def __init__(self, cpu_seconds: Callable[[], float], clock: Clock, cores: float | None = None):
        self._cpu_seconds, self._clock, self._cores = cpu_seconds, clock, cores
        self._last: tuple[float, float] | None = None

    def __call__(self) -> float | None:
        before, self._last = self._last, (self._clock(), self._cpu_seconds())
        if before is None or self._last[0] - before[0] < MIN_SPAN_S:
            return None
        # A child that outlives the process that started it takes its time out of the sum.
        busy = 100 * max(self._last[1] - before[1], 0.0) / (self._last[0] - before[0])
        return busy if self._cores is None else min(busy / self._cores, 100.0)


def _warn(message: str) -> None:
    """Warn. Where warnings are errors, say nothing: a measurement must not end a run."""
    with contextlib.suppress(Warning):
        warnings.warn(message, RuntimeWarning, stacklevel=2)
