"""Telemetry: a thread reads a probe into a timeline, and what was read is summed up afterwards over any spans of time."""

import threading
import time
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ..errors import in_one_line
from .nvml_readings import ENERGY, Clock

MIN_INTERVAL_S = 0.1  # NVML renews its readings no faster, and the thread holds the interpreter while it reads
PATIENCE_S = 1.0  # a driver that hangs must not hang the run
MAX_SAMPLES = 10_000  # 42 minutes at 4 Hz and 10 MB; then every second one is dropped

Span = tuple[float, float]  # where it starts and ends, in seconds of the sampler's clock


class Sample(NamedTuple):
    """Readings and the time at which they were taken. They are of the time since the sample before."""

    timestamp: float
    readings: dict[str, float]


class Timeline:
    """The samples of a device, in the order of their time."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Append a sample. Of more than `MAX_SAMPLES`, every second one is dropped; a counter in the others stays right."""
        if not self._samples or sample.timestamp > self._samples[-1].timestamp:
            self._samples.append(sample)
        if len(self._samples) > MAX_SAMPLES:
            self._samples = self._samples[::2]

    def after(self, timestamp: float) -> list[Sample]:
        """The samples that were taken after a time."""
        samples = self._samples  # the thread may replace it
        return samples[bisect_right(samples, timestamp, key=attrgetter("timestamp")) :]

    def over(self, spans: Iterable[Span]) -> dict[str, float]:
        """Sum up the readings over spans that follow each other; empty where they hold no time between two samples.

        Memory has the maximum of the samples that are kept (`host/rss_max_gib`), other readings have their mean over
        time (`device/power_mean_w`). `seconds` are those of the spans between the first and the last sample. `energy_j`, in
        joules, is that of the device's own counter, interpolated between samples, where it was read all the time.
        """
        samples = list(self._samples)
        times = numpy.array([sample.timestamp for sample in samples])
        within = _seconds_within(spans, times)
        used = within > 0
        if not used.any():
            return {}
        result = {"seconds": float(within.sum())}
        for key in dict.fromkeys(key for sample in samples for key in sample.readings):
            values = numpy.array([sample.readings.get(key, numpy.nan) for sample in samples])
            known = used & ~numpy.isnan(values[1:])
            if key == ENERGY:
                joules = numpy.diff(values)
                if (joules[used] >= 0).all():  # read all the time, and not reset by a reloaded driver
                    result["energy_j"] = float((joules / numpy.diff(times) * within)[used].sum())
            elif known.any() and key.endswith("_gib"):
                result[named(key, "max")] = float(values[1:][known].max())
            elif known.any():
                result[named(key, "mean")] = float(numpy.average(values[1:][known], weights=within[known]))
        return result


def _seconds_within(spans: Iterable[Span], times: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """How long each of the N − 1 intervals between N times lies within spans, shape (N − 1,)."""
    borders = numpy.array(list(spans), float).reshape(-1, 2)
    if not len(borders) or not len(times):
        return numpy.zeros(max(len(times) - 1, 0))
    ends = numpy.cumsum(borders[:, 1] - borders[:, 0])
    starts = ends - (borders[:, 1] - borders[:, 0])
    elapsed = numpy.column_stack([starts, ends]).ravel()  # seconds within spans up to each border
    return numpy.diff(numpy.interp(times, borders.ravel(), elapsed))


def named(key: str, word: str) -> str:
    """A key with a word before its unit: `device/power_w`, `mean` → `device/power_mean_w`."""
    name, _, unit = key.rpartition("_")
    return f"{name}_{word}_{unit}"


class Spans:
    """Spans of time, as they begin and end; 16 bytes each."""

    def __init__(self, clock: Clock = time.perf_counter):
        self._clock = clock
        self._borders = array("d")

    @property
    def running(self) -> bool:
        """Whether a span has begun and not ended."""
        return len(self._borders) % 2 == 1

    def run(self, running: bool) -> None:
        """Begin a span, or end it; without effect where one runs already, or none does."""
        if running != self.running:
            self._borders.append(self._clock())

    def clear(self) -> None:
        """Forget the time so far; a span that runs begins now."""
        running, self._borders = self.running, array("d")
        self.run(running)

    def all(self) -> list[Span]:
        """The spans so far; one that runs ends now."""
        borders = [*self._borders, *([self._clock()] if self.running else [])]
        return list(zip(borders[::2], borders[1::2], strict=True))


class Sampler:
    """Reads in a daemon thread into `timeline`, every `interval_s` seconds (at least 0.1 s). Only the thread reads."""

    def __init__(
        self, read: Callable[[], dict[str, float]], interval_s: float = 0.25, clock: Clock = time.perf_counter
    ):
        self.interval_s = max(interval_s, MIN_INTERVAL_S)
        self.timeline = Timeline()
        self._read_probe = read
        self._clock = clock
        self._thread: threading.Thread | None = None

    @property
    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()  # which it is not in a forked child

    def start(self) -> None:
        """Begin a new timeline with a first sample. Without effect while the thread runs."""
        if not self._runs:
            self.timeline = Timeline()
            self._due, self._taken, self._ended = threading.Event(), threading.Event(), threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self.timeline,), name="telemetry", daemon=True)
            self._thread.start()
            self._taken.wait(PATIENCE_S)

    def sample(self) -> None:
        """Have the thread take a sample now, and wait for it, but not for a driver that hangs. Only while it runs."""
        if self._runs:
            self._taken.clear()
            self._due.set()
            self._taken.wait(PATIENCE_S)

    def stop(self) -> None:
        """Take a last sample and end the thread; the timeline stays. Can be called again, or without a start."""
        if self._thread is not None and self._runs:
            self._ended.set()
            self._due.set()
            self._thread.join(timeout=PATIENCE_S)
        self._thread = None

    def _run(self, timeline: Timeline) -> None:
        due, taken, ended = self._due, self._taken, self._ended  # of this thread; a later start has its own
        while True:
            is_last = ended.is_set()
            try:
                readings = self._read_probe()
                timeline.add(Sample(self._clock(), readings))
            except Exception as error:  # noqa: BLE001 - anybody's driver, and nothing else would say so
                warnings.warn(f"The device is not sampled any more: {in_one_line(error)}", stacklevel=1)
                is_last = True
            taken.set()
            if is_last:
                return
            due.wait(self.interval_s)
            due.clear()
