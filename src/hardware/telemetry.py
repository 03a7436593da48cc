"""Telemetry: a thread reads the training device and the process a few times a second, and what was read is summed up.

A reading that the device does not offer is left out, never 0. A query that is refused is dropped at its first failure, with
a warning. Nothing raises into the training.
"""

import contextlib
import math
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Mapping

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
_MOST = 2**17  # rows that are kept, 14 MiB; when there are so many, older ones are merged
_JOULES = "joules"  # the column of a row's energy in training; NaN where it is not known
_HIGHEST = ("_max_gib", "_peak_gib")  # of the training in a row


class Telemetry:
    """Reads in a daemon thread, every `interval_s` seconds (at least 0.1 s) and where a sample is asked for, until `stop`.

    A sample stands for the time since the one before, which is training or is not. Memory is bounded: where
    there are 2**17 samples, the newest quarter is kept, and of the others one is made for each span of time.

    Attributes:
        is_training: whether the time since the last sample is training.
        samples: how many were taken.
    """

    def __init__(self, read: Callable[[], dict[str, float]], interval_s: float, clock: Clock = time.perf_counter):
        self.is_training = False
        self.samples = 0
        self._read, self._clock, self._interval_s = read, clock, max(interval_s, MIN_INTERVAL_S)
        self._lock = threading.Lock()  # for the rows: the last of `samples`, and those that were merged
        self._columns: dict[str, array[float]] = {}  # the readings by key, NaN where there is none
        self._times, self._trained_s = array("d"), array("d")  # of a row: its end, and its seconds of training
        self._counter = math.nan  # of energy, at the last sample
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

        Merged samples have the last time, and the lowest reading of memory, which is what growth.py looks at.
        """
        with self._lock:
            row = max(0, first - (self.samples - len(self._times)))
            times, values = numpy.array(self._times[row:]), numpy.array(self._columns.get(key, array("d"))[row:])
        if not len(values):
            return values, values
        known = ~numpy.isnan(values)
        return times[known], values[known]

    def summary(self, since: float = -math.inf) -> dict[str, float]:
        """Sum up the samples of training after a time; empty where there are none.

        Memory has its maximum (`host/rss_max_gib`), and the peak of the device is that of validations, too. Other readings have
        their mean over time (`device/power_mean_w`).
        `seconds` are those of the samples. `energy_j`, in joules, is that of the device's own counter, where it was read all
        the time.
        """
        with self._lock:
            times, seconds = numpy.array(self._times), numpy.array(self._trained_s)
            columns = {key: numpy.array(column) for key, column in self._columns.items()}
        used = (times > since) & (seconds > 0)
        if not used.any():
            return {}
        found = {"seconds": float(seconds[used].sum())}
        for key, values in columns.items():
            known = used & ~numpy.isnan(values)
            if key == _JOULES:
                joules = values[used]
                found |= {"energy_j": float(joules.sum())} if (joules >= 0).all() else {}  # not reset by a new driver
            elif key == PEAK and (of_fit := (times > since) & ~numpy.isnan(values)).any():
                found[key] = float(values[of_fit].max())  # of validations, too
            elif known.any() and key.endswith(_HIGHEST):
                found[key] = float(values[known].max())
            elif known.any() and not key.endswith("_gib"):
                found[named(key, "mean")] = float(numpy.average(values[known], weights=seconds[known]))
        return found

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last, readings = self._ended, self._read()
            with self._lock:
                self._append(readings, self._clock())
                if len(self._times) >= _MOST:
                    self._merge()
            self._taken.set()
            if not is_last:
                self._due.wait(self._interval_s)
                self._due.clear()

    def _append(self, readings: Mapping[str, float], now: float) -> None:
        joules, self._counter = readings.get(ENERGY, math.nan) - self._counter, readings.get(ENERGY, math.nan)
        row = {key: value for key, value in readings.items() if key != ENERGY}
        row |= {named(key, "max"): value for key, value in row.items() if key.endswith("_gib") and key != PEAK}
        row[_JOULES] = joules if self.is_training else 0.0
        for key in row.keys() - self._columns.keys():
            self._columns[key] = array("d", [math.nan]) * len(self._times)
        for key, column in self._columns.items():
            column.append(row.get(key, math.nan))
        self._trained_s.append(now - self._times[-1] if self.is_training and self._times else 0.0)
        self._times.append(now)
        self.samples += 1

    def _merge(self) -> None:
        """Make one row of the older ones of each span of time: sums, means and maxima of the training stay what they are.

        Spans are equal, and a longer one consists of whole shorter ones, so the rows of all older times are alike.
        """
        old = 3 * _MOST // 4
        times, seconds = numpy.array(self._times[:old]), numpy.array(self._trained_s[:old])
        span = 2.0 ** math.ceil(math.log2((times[-1] - times[0]) / (_MOST // 2)))
        first = numpy.flatnonzero(numpy.diff(times // span, prepend=-math.inf))
        for key, column in self._columns.items():
            column[:old] = array("d", _merged(key, numpy.array(column[:old]), seconds, first).tobytes())
        self._trained_s[:old] = array("d", numpy.add.reduceat(seconds, first).tobytes())
        self._times[:old] = array("d", times[numpy.append(first[1:], old) - 1].tobytes())


def _merged(
    key: str, values: NDArray[numpy.float64], seconds: NDArray[numpy.float64], first: NDArray[numpy.intp]
) -> NDArray[numpy.float64]:
    """The readings of groups of rows, given the seconds of training of each row and the first row of each group."""
    if key == _JOULES:
        return numpy.add.reduceat(numpy.where(values >= 0, values, math.nan), first)
    if key == PEAK:
        return numpy.fmax.reduceat(values, first)
    if key.endswith(_HIGHEST):
        return numpy.fmax.reduceat(numpy.where(seconds > 0, values, math.nan), first)
    if key.endswith("_gib"):
        return numpy.fmin.reduceat(values, first)
    weights = numpy.where(numpy.isnan(values), 0.0, seconds)
    with numpy.errstate(invalid="ignore"):  # NaN where nothing was read of the training
        return numpy.add.reduceat(weights * numpy.nan_to_num(values), first) / numpy.add.reduceat(weights, first)


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
