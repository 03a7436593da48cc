"""Telemetry: a thread reads the training device and the process a few times a second, and summarizes the readings.

A reading that the device does not offer is left out, never 0. A query is dropped at its first failure, with a warning.
No error reaches the training.
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

from .device_memory import training_memory
from .nvml_readings import ENERGY, UTILIZATION, Clock, Query, gpu_queries
from .processor import own_seconds, usable_cores

# Of a CPU as the training device: processor time of the process and its children ÷ that of the usable cores.
PROCESSOR_TIME = "device/processor_time_pct"
CPU = "host/cpu_pct"  # of the process; 100 is one core fully busy
RSS = "host/rss_gib"  # of the process: resident memory
ALLOCATED = "device/memory_allocated_gib"
PEAK = "device/memory_peak_gib"

MIN_INTERVAL_S = 0.1  # NVML updates its readings no faster, and the thread holds the GIL while it reads
MIN_SPAN_S = 0.05  # CPU times of processes have a resolution of 10 ms: a rate over less time is mostly rounding
SETTLE_S = 2.1  # NVML's utilisation is that of the last complete window, which lasts 1/6 to 1 s and began up to 2 s ago
PATIENCE_S = 1.0  # a hanging driver must not block the run
_GIB = 2**30
_INTERVAL_SHARE = 2**-13  # least interval ÷ time so far: at most 55,000 samples in a week


class Sample(NamedTuple):
    """The readings at one time, and the part of the time since the last sample that is training."""

    time: float
    trained_s: float
    trained_j: float  # the device's energy during training; NaN if unknown
    readings: Mapping[str, float]


class Telemetry:
    """Samples in a daemon thread, every `interval_s` seconds (at least 0.1 s) and at each call of `sample`, until `stop`.

    A sample represents the time since the last sample, which is either training or not. In a long run the interval grows with
    the time so far, to limit the number of samples.

    Attributes:
        is_training: whether the time since the last sample is training.
    """

    def __init__(self, read: Callable[[], dict[str, float]], interval_s: float, clock: Clock = time.perf_counter):
        self.is_training = False
        self._read, self._clock, self._interval_s = read, clock, max(interval_s, MIN_INTERVAL_S)
        self._samples: list[Sample] = []
        self._requested, self._sampled, self._is_ended = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()
        self._sampled.wait(PATIENCE_S)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self._samples)

    def sample(self, is_training: bool | None = None) -> None:
        """Have the thread take a sample now; `is_training` says whether the time after it is training, None for no change."""
        if self._thread.is_alive():  # not in a forked child
            self._sampled.clear()
            self._requested.set()
            self._sampled.wait(PATIENCE_S)
        self.is_training = self.is_training if is_training is None else is_training

    def stop(self) -> None:
        """Take a last sample and end the thread; the samples remain. Further calls have no effect."""
        self._is_ended = True
        self._requested.set()
        self._thread.join(timeout=PATIENCE_S)

    def readings(self, key: str, first: int = 0) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """Return the times and the readings of a key, from the sample number `first` on, shape (N,) each."""
        points = [(sample.time, sample.readings[key]) for sample in self._samples[first:] if key in sample.readings]
        times, values = numpy.array(points, float).reshape(-1, 2).T
        return times, values

    def summary(self, since: float = -math.inf) -> dict[str, float]:
        """Summarize the samples of training after the time `since`; empty if there are none.

        Memory is summarized by its maximum (`host/rss_max_gib`); the device's peak includes validations. Other readings are
        summarized by their mean over time (`device/power_mean_w`). `seconds` is the time of these samples. `energy_j`, in
        joules, is that of the device's counter, if every sample has it.
        """
        later = [sample for sample in self._samples if sample.time > since]
        training = [sample for sample in later if sample.trained_s > 0]
        if not training:
            return {}
        summary: dict[str, float] = {"seconds": sum(sample.trained_s for sample in training)}
        if all(sample.trained_j >= 0 for sample in training):  # NaN is unknown; a reset of the counter is negative
            summary["energy_j"] = sum(sample.trained_j for sample in training)
        for key in dict.fromkeys(key for sample in later for key in sample.readings if key != ENERGY):
            with_reading = [sample for sample in (later if key == PEAK else training) if key in sample.readings]
            values = [sample.readings[key] for sample in with_reading]
            if with_reading and key.endswith("_gib"):
                summary[key if key == PEAK else with_statistic(key, "max")] = max(values)
            elif with_reading:
                weights = [sample.trained_s for sample in with_reading]
                summary[with_statistic(key, "mean")] = float(numpy.average(values, weights=weights))
        return summary

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last, readings, now = self._is_ended, self._read(), self._clock()
            previous = self._samples[-1] if self._samples else Sample(now, 0.0, 0.0, {})
            joules = readings.get(ENERGY, math.nan) - previous.readings.get(ENERGY, math.nan)
            trained = (now - previous.time, joules) if self.is_training else (0.0, 0.0)
            self._samples.append(Sample(now, *trained, readings))
            self._sampled.set()
            if not is_last:
                self._requested.wait(max(self._interval_s, _INTERVAL_SHARE * (now - self._samples[0].time)))
                self._requested.clear()


def with_statistic(key: str, word: str) -> str:
    """Insert a word before the unit of a key: `device/power_w`, `mean` → `device/power_mean_w`."""
    name, _, unit = key.rpartition("_")
    return f"{name}_{word}_{unit}"


def queries_for(device: torch.device, clock: Clock = time.perf_counter) -> dict[str, Query]:
    """Return the queries of a training device's and this process's readings, by key; never raises.

    A GPU's utilisation, which is that of a past window, is None for the first `SETTLE_S` seconds.
    """
    process = psutil.Process()
    queries: dict[str, Query] = {
        CPU: _busy_query(time.process_time, clock),
        RSS: lambda: process.memory_info().rss / _GIB,
        ALLOCATED: _memory_query(device),
    }
    if device.type == "cpu":
        queries[PROCESSOR_TIME] = _busy_query(own_seconds, clock, usable_cores())
    elif device.type == "cuda":
        try:
            queries |= gpu_queries(device)
        except Exception as error:  # noqa: BLE001 - a missing or broken library or driver may raise anything
            _warn(f"no readings of {device}, NVML is not available: {error or type(error).__name__}")
    if UTILIZATION in queries:
        utilization, settled = queries[UTILIZATION], clock() + SETTLE_S
        queries[UTILIZATION] = lambda: utilization() if clock() >= settled else None
    return queries


def read(queries: dict[str, Query]) -> dict[str, float]:
    """Return the readings of the queries; rates are over the time since the last call. Drop a query that fails."""
    readings: dict[str, float] = {}
    for key, query in list(queries.items()):
        try:
            value = query()
            if isinstance(value, Mapping):
                readings |= value
            elif value is not None:
                readings[key] = float(value)
        except Exception as error:  # noqa: BLE001 - a library may raise anything, and none may end a run
            del queries[key]
            _warn(f"{key} is left out: {error or type(error).__name__}")
    return readings


def _memory_query(device: torch.device) -> Query:
    """Return a query of the memory that training holds, and its peak from now on: on CUDA the allocator's, else the readings'."""
    peak = 0
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # an allocator other than torch's
            torch.cuda.reset_peak_memory_stats(device)

    def query() -> dict[str, float]:
        nonlocal peak
        if (bytes_now_and_peak := training_memory(device)) is None:
            return {}
        peak = max(peak, bytes_now_and_peak[1])
        return {ALLOCATED: bytes_now_and_peak[0] / _GIB, PEAK: peak / _GIB}

    return query


def _busy_query(cpu_seconds: Callable[[], float], clock: Clock, cores: float | None = None) -> Query:
    """Return a query of the CPU seconds between two calls, in % of `cores`; None at the first call and after too short a time.

    With `cores` it is at most 100: clocks of different resolution may give slightly more.
    """
    latest: tuple[float, float] | None = None

    def query() -> float | None:
        nonlocal latest
        previous, latest = latest, (clock(), cpu_seconds())
        if previous is None or latest[0] - previous[0] < MIN_SPAN_S:
            return None
        # The time leaves the sum with a child that outlives its parent, which makes the difference negative.
        busy = 100 * max(latest[1] - previous[1], 0.0) / (latest[0] - previous[0])
        return busy if cores is None else min(busy / cores, 100.0)

    return query


def _warn(message: str) -> None:
    """Warn; where warnings are errors, do nothing: a measurement must not end a run."""
    with contextlib.suppress(Warning):
        warnings.warn(message, RuntimeWarning, stacklevel=2)
