"""Telemetry: a thread reads the training device and the process a few times a second, and what was read is summed up.

A reading that the device does not offer is left out, never 0. A query that is refused is dropped at its first failure, with
a warning. Nothing raises into the training.
"""

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

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
_MOST = 2**14  # rows that are kept, 10 MiB
# Columns of a row beside the readings: its end, its seconds of training, how many samples it holds, and the energy of its
# seconds of training, which is left out where it is not known.
_AT, _SECONDS, _SAMPLES, _JOULES = "at", "seconds", "samples", "joules"
_HIGHEST = ("_max_gib", "_peak_gib")  # of the training in a row
Row = dict[str, float]


class Telemetry:
    """Reads in a daemon thread, every `interval_s` seconds (at least 0.1 s) and where a sample is asked for, until `stop`.

    A sample stands for the time since the one before, which is training or is not. Memory is bounded: a row holds a
    sample, and where there are 2**14 rows, each two of them become one, and later rows hold twice as many samples.

    Attributes:
        is_training: whether the time since the last sample is training.
        samples: how many were taken.
    """

    def __init__(self, read: Callable[[], dict[str, float]], interval_s: float, clock: Clock = time.perf_counter):
        self.is_training = False
        self.samples = 0
        self._read, self._clock, self._interval_s = read, clock, max(interval_s, MIN_INTERVAL_S)
        self._lock = threading.Lock()  # for the rows
        self._rows: list[Row] = []
        self._in_a_row = 1  # samples
        self._last_at, self._counter = math.nan, math.nan  # the time, and the counter of energy, of the last sample
        self._due, self._taken, self._ended = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()
        self._taken.wait(PATIENCE_S)

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
        """The times of the samples from a first one on that have a reading, and their readings, shape (N,) each.

        The samples of one row have the last time, and the lowest reading of memory, which is what growth.py looks at.
        """
        with self._lock:
            told = [(row[_AT], row[key]) for row in self._rows[first // self._in_a_row :] if key in row]
        times, values = numpy.array(told, float).reshape(-1, 2).T
        return times, values

    def summary(self, since: float = -math.inf) -> dict[str, float]:
        """Sum up the samples of training after a time; empty where there are none.

        Memory has its maximum (`host/rss_max_gib`), and the peak of the device is that of validations, too. Other readings have
        their mean over time (`device/power_mean_w`).
        `seconds` are those of the samples. `energy_j`, in joules, is that of the device's own counter, where it was read all
        the time.
        """
        with self._lock:
            after = [row for row in self._rows if row[_AT] > since]
        rows = [row for row in after if row[_SECONDS] > 0]
        if not rows:
            return {}
        found, total = {}, _merged(rows) | {key: value for key, value in _merged(after).items() if key == PEAK}
        for key, value in total.items():
            if key == _JOULES:
                found["energy_j"] = value
            elif key == _SECONDS or key.endswith(_HIGHEST):
                found[key] = value
            elif key not in (_AT, _SAMPLES) and not key.endswith("_gib"):
                found[named(key, "mean")] = value
        return found

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last, readings = self._ended, self._read()
            with self._lock:
                self._append(readings, self._clock())
            self._taken.set()
            if not is_last:
                self._due.wait(self._interval_s)
                self._due.clear()

    def _append(self, readings: Mapping[str, float], now: float) -> None:
        row = {key: value for key, value in readings.items() if key != ENERGY}
        row |= {named(key, "max"): value for key, value in row.items() if key.endswith("_gib") and key != PEAK}
        joules, self._counter = readings.get(ENERGY, math.nan) - self._counter, readings.get(ENERGY, math.nan)
        if not self.is_training or joules >= 0:  # not refused, and not reset by a new driver
            row[_JOULES] = joules if self.is_training else 0.0
        seconds = now - self._last_at if self.is_training and self._rows else 0.0
        row |= {_AT: now, _SECONDS: seconds, _SAMPLES: 1.0}
        self._last_at = now
        self.samples += 1
        if self._rows and self._rows[-1][_SAMPLES] < self._in_a_row:
            row = _merged([self._rows.pop(), row])
        self._rows.append(row)
        if len(self._rows) > _MOST:
            self._in_a_row *= 2
            self._rows = [_merged(self._rows[at : at + 2]) for at in range(0, len(self._rows), 2)]


def _merged(rows: Sequence[Row]) -> Row:
    """One row of several that follow each other: sums, means and maxima of the training stay what they are."""
    merged: Row = {}
    for key in {key: None for row in rows for key in row}:
        told = [row for row in rows if key in row]
        values, seconds = [row[key] for row in told], [row[_SECONDS] for row in told]
        if key in (_SECONDS, _SAMPLES) or (key == _JOULES and len(told) == len(rows)):
            merged[key] = sum(values)
        elif key == _AT:
            merged[key] = values[-1]
        elif key == PEAK:  # of validations, too
            merged[key] = max(values)
        elif key.endswith("_gib") and not key.endswith(_HIGHEST):
            merged[key] = min(values)
        elif key != _JOULES and any(seconds):
            in_training = [value for value, spent in zip(values, seconds, strict=True) if spent]
            is_highest = key.endswith(_HIGHEST)
            merged[key] = max(in_training) if is_highest else float(numpy.average(values, weights=seconds))
    return merged


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
