"""Telemetry: a thread reads the training device and the process a few times a second, and what was read is summed up.

A reading that the device does not offer is left out, never 0. A query that is refused is dropped at its first failure, with
a warning. Nothing raises into the training.
"""

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy
import psutil
import torch
from numpy.typing import NDArray

from .device_memory import memory_of
from .nvml_readings import ENERGY, UTILIZATION, Clock, Query, gpu_queries
from .processor import own_seconds, usable_cores

# Of a CPU as the training device: processor time of the process and its children, of that of the usable cores.
PROCESSOR_TIME = "device/processor_time_pct"
CPU = "host/cpu_pct"  # of the process; 100 is one core fully busy
RSS = "host/rss_gib"  # memory of the process that is in RAM
ALLOCATED = "device/memory_allocated_gib"
PEAK = "device/memory_peak_gib"

MIN_INTERVAL_S = 0.1  # NVML renews its readings no faster, and the thread holds the interpreter while it reads
MIN_SPAN_S = 0.05  # CPU times of other processes tick at 10 ms: a rate over less time is mostly rounding
SETTLE_S = 2.1  # NVML's utilisation is of the last complete window, which took 1/6 to 1 s and began up to 2 s ago
PATIENCE_S = 1.0  # a driver that hangs must not hang the run
_GIB = 2**30
_SHARE = 2**-13  # of the time so far, which an interval lasts at least: 55,000 samples in a week


class Sample(NamedTuple):
    """What was read at a time, and what of the time since the sample before is training."""

    time: float
    trained_s: float
    trained_j: float  # the device's energy meanwhile; NaN where it is not known
    readings: Mapping[str, float]


class Telemetry:
    """Reads in a daemon thread, every `interval_s` seconds (at least 0.1 s) and where a sample is asked for, until `stop`.

    A sample stands for the time since the one before, which is training or is not. In a long run the interval grows with
    the time so far, so that there are not too many samples.

    Attributes:
        is_training: whether the time since the last sample is training.
    """

    def __init__(self, read: Callable[[], dict[str, float]], interval_s: float, clock: Clock = time.perf_counter):
        self.is_training = False
        self._read, self._clock, self._interval_s = read, clock, max(interval_s, MIN_INTERVAL_S)
        self._samples: list[Sample] = []
        self._due, self._taken, self._ended = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()
        self._taken.wait(PATIENCE_S)

    @property
    def samples(self) -> int:
        """How many were taken."""
        return len(self._samples)

    def sample(self, is_training: bool | None = None) -> None:
        """Have the thread take a sample now; the time after it is training, or is not, or what it was before."""
        if self._thread.is_alive():  # which it is not in a forked child
            self._taken.clear()
            self._due.set()
            self._taken.wait(PATIENCE_S)
        self.is_training = self.is_training if is_training is None else is_training

    def stop(self) -> None:
        """Take a last sample and end the thread; the samples stay. Can be called again."""
        self._ended = True
        self._due.set()
        self._thread.join(timeout=PATIENCE_S)

    def readings(self, key: str, first: int = 0) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """The times of the samples from a first one on that have a reading, and their readings, shape (N,) each."""
        known = [(each.time, each.readings[key]) for each in self._samples[first:] if key in each.readings]
        times, values = numpy.array(known, float).reshape(-1, 2).T
        return times, values

    def summary(self, since: float = -math.inf) -> dict[str, float]:
        """Sum up the samples of training after a time; empty where there are none.

        Memory has its maximum (`host/rss_max_gib`), and the peak of the device is that of validations, too. Other readings have
        their mean over time (`device/power_mean_w`).
        `seconds` are those of the samples. `energy_j`, in joules, is that of the device's own counter, where it was read all
        the time.
        """
        later = [each for each in self._samples if each.time > since]
        trained = [each for each in later if each.trained_s > 0]
        if not trained:
            return {}
        found: dict[str, float] = {"seconds": sum(each.trained_s for each in trained)}
        if all(each.trained_j >= 0 for each in trained):  # nor was it reset by a new driver
            found["energy_j"] = sum(each.trained_j for each in trained)
        for key in dict.fromkeys(key for each in later for key in each.readings if key != ENERGY):
            known = [each for each in (later if key == PEAK else trained) if key in each.readings]
            values = [each.readings[key] for each in known]
            if known and key.endswith("_gib"):
                found[key if key == PEAK else named(key, "max")] = max(values)
            elif known:
                found[named(key, "mean")] = float(numpy.average(values, weights=[each.trained_s for each in known]))
        return found

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last, readings, now = self._ended, self._read(), self._clock()
            before = self._samples[-1] if self._samples else Sample(now, 0.0, 0.0, {})
            joules = readings.get(ENERGY, math.nan) - before.readings.get(ENERGY, math.nan)
            trained = (now - before.time, joules) if self.is_training else (0.0, 0.0)
            self._samples.append(Sample(now, *trained, readings))
            self._taken.set()
            if not is_last:
                self._due.wait(max(self._interval_s, _SHARE * (now - self._samples[0].time)))
                self._due.clear()


def named(key: str, word: str) -> str:
    """A key with a word before its unit: `device/power_w`, `mean` → `device/power_mean_w`."""
    name, _, unit = key.rpartition("_")
    return f"{name}_{word}_{unit}"


def queries_for(device: torch.device, clock: Clock = time.perf_counter) -> dict[str, Query]:
    """What can be read of a training device and of this process, by key; never raises.

    A GPU's utilisation, which is of a time before, is read after `SETTLE_S` seconds.
    """
    process = psutil.Process()
    queries: dict[str, Query] = {
        CPU: _busy_percent(time.process_time, clock),
        RSS: lambda: process.memory_info().rss / _GIB,
        ALLOCATED: _memory(device),
    }
    if device.type == "cpu":
        queries[PROCESSOR_TIME] = _busy_percent(own_seconds, clock, usable_cores())
    elif device.type == "cuda":
        try:
            queries |= gpu_queries(device)
        except Exception as error:  # noqa: BLE001 - a library or a driver that is missing or broken in its own way
            _warn(f"no readings of {device}, NVML is not available: {error or type(error).__name__}")
    if UTILIZATION in queries:
        utilization, settled = queries[UTILIZATION], clock() + SETTLE_S
        queries[UTILIZATION] = lambda: utilization() if clock() >= settled else None
    return queries


def read(queries: dict[str, Query]) -> dict[str, float]:
    """The readings of the queries; rates are over the time since the last read. A refused query is dropped."""
    readings: dict[str, float] = {}
    for key, query in list(queries.items()):
        try:
            value = query()
            if isinstance(value, Mapping):
                readings |= value
            elif value is not None:
                readings[key] = float(value)
        except Exception as error:  # noqa: BLE001 - every library has its own, and none may end a run
            del queries[key]
            _warn(f"{key} is left out: {error or type(error).__name__}")
    return readings


def _memory(device: torch.device) -> Query:
    """The memory that training holds, and its peak since now; on CUDA the allocator's own, else of the readings."""
    peak = 0
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of another allocator than torch's
            torch.cuda.reset_peak_memory_stats(device)

    def query() -> dict[str, float]:
        nonlocal peak
        if (told := memory_of(device)) is None:
            return {}
        peak = max(peak, told[1])
        return {ALLOCATED: told[0] / _GIB, PEAK: peak / _GIB}

    return query


def _busy_percent(cpu_seconds: Callable[[], float], clock: Clock, cores: float | None = None) -> Query:
    """CPU seconds between two calls, in % of so many cores; None at the first call and after too short a time.

    Of more cores than one it is at most 100: clocks that tick differently may show a little more.
    """
    last: tuple[float, float] | None = None

    def query() -> float | None:
        nonlocal last
        before, last = last, (clock(), cpu_seconds())
        if before is None or last[0] - before[0] < MIN_SPAN_S:
            return None
        # A child that outlives the process that started it takes its time out of the sum.
        busy = 100 * max(last[1] - before[1], 0.0) / (last[0] - before[0])
        return busy if cores is None else min(busy / cores, 100.0)

    return query


def _warn(message: str) -> None:
    """Warn. Where warnings are errors, say nothing: a measurement must not end a run."""
    with contextlib.suppress(Warning):
        warnings.warn(message, RuntimeWarning, stacklevel=2)
