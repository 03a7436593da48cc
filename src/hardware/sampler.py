"""Sampler: reads probes in a thread, and sums up what they read over a window of time."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .probes import ENERGY, POWER, Clock, Probe, reason, warn_once

MIN_INTERVAL_S = 0.1  # NVML renews its readings no faster, and the thread holds the interpreter while it reads
PATIENCE_S = 1.0  # a driver that hangs must not hang the run
KEPT_SAMPLES = 4096  # without a call of `drain`: 17 minutes at 4 Hz


class Sample(NamedTuple):
    """Readings and the time at which they were taken, by the sampler's clock."""

    timestamp: float
    readings: dict[str, float]


class Window:
    """Means, maxima and energy of successive samples. Each sample stands for the time since the one before."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sums: dict[str, tuple[float, float, float]] = {}  # key → Σ value·seconds, Σ seconds, maximum
        self._counted = (0.0, 0.0)  # joules by the counter, and the seconds they were counted over
        self._last: Sample | None = None

    def open(self, sample: Sample) -> None:
        """Begin a stretch of time. The sample's readings are of the time before; only its counter is used."""
        self._last = sample

    def add(self, sample: Sample) -> None:
        """Let the sample stand for the time since the last one."""
        last, self._last = self._last, sample
        if last is None or sample.timestamp <= last.timestamp:
            return
        seconds = sample.timestamp - last.timestamp
        self.seconds += seconds
        for key, value in sample.readings.items():
            if key != ENERGY:
                total, weight, highest = self._sums.get(key, (0.0, 0.0, value))
                self._sums[key] = (total + value * seconds, weight + seconds, max(highest, value))
        if ENERGY in sample.readings and ENERGY in last.readings:
            joules = sample.readings[ENERGY] - last.readings[ENERGY]
            if joules >= 0:  # otherwise the driver was reloaded
                self._counted = (self._counted[0] + joules, self._counted[1] + seconds)

    def summary(self) -> dict[str, float | str]:
        """See `Sampler.summary`."""
        if not self.seconds:
            return {}
        result: dict[str, float | str] = {"seconds": self.seconds}
        for key, (total, weight, highest) in list(self._sums.items()):  # the thread may be adding
            word, value = ("max", highest) if key.endswith("_gib") else ("mean", total / weight)
            result[named(key, word)] = value
        joules, seconds = self._sums.get(POWER, (0.0, 0.0, 0.0))[:2]
        if self._counted[1] and self._counted[1] >= seconds:
            result |= {"energy_j": self._counted[0], "energy_source": "counter"}
        elif seconds:
            result |= {"energy_j": joules, "energy_source": "power_integral"}
        return result


def named(key: str, word: str) -> str:
    """A key with a word before its unit: `device/power_w`, `mean` → `device/power_mean_w`."""
    name, _, unit = key.rpartition("_")
    return f"{name}_{word}_{unit}"


class Sampler:
    """Reads probes in a daemon thread, every `interval_s` seconds (at least 0.1 s)."""

    def __init__(self, probes: Sequence[Probe], interval_s: float = 0.25, clock: Clock = time.perf_counter):
        self.interval_s = max(interval_s, MIN_INTERVAL_S)
        self._probes = list(probes)
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._reset()

    def start(self) -> None:
        """Begin a new window with a first sample, and a new thread. Without effect while the thread runs."""
        if self._thread is None or not self._thread.is_alive():  # it is not alive in a forked child
            self._reset()
            self._pid = os.getpid()
            self.resume()
            self._thread = threading.Thread(target=self._run, args=(self._ended,), name="telemetry", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread; the readings stay. Can be called again, or without a start."""
        if self._thread is None or self._pid != os.getpid():
            return
        self._ended.set()
        self.pause()
        self._thread.join(timeout=PATIENCE_S)
        self._thread = None

    def pause(self) -> None:
        """Take a sample, then none until `resume`: the summary excludes the time between."""
        self._sample(last=True)

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._locked() as locked:
            if locked and self.paused:
                self._window.open(self._read())
                self.paused = False

    def restart(self) -> None:
        """Begin a new summary, which excludes the time until now. Samples that were not drained stay."""
        with self._locked() as locked:
            if locked:
                self._window = Window()
                if not self.paused:
                    self._window.open(self._read())

    def drain(self) -> list[Sample]:
        """The samples since the last call; of more than KEPT_SAMPLES the latest."""
        samples = []
        while self._samples:
            samples.append(self._samples.popleft())
        return samples

    def summary(self) -> dict[str, float | str]:
        """Sums up the `seconds` since `start` or `restart`, without paused time; empty before the first sample.

        Memory has its maximum (`host/rss_max_gib`), other readings have their mean over time (`device/power_mean_w`).
        `energy_j` is in joules, with `energy_source` `counter` (the device's own) or `power_integral` (power by time),
        where the device offers either.
        """
        return self._window.summary()

    def _reset(self) -> None:
        self.paused = True
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._window = Window()
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)

    def _sample(self, last: bool = False) -> None:
        with self._locked() as locked:
            if locked and not self.paused:
                sample = self._read()
                self._window.add(sample)
                self._samples.append(sample)
                self.paused = last

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the lock is held: the thread may be waiting for a driver that hangs."""
        locked = self._lock.acquire(timeout=PATIENCE_S)
        try:
            yield locked
        finally:
            if locked:
                self._lock.release()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(self.interval_s):
            self._sample()

    def _read(self) -> Sample:
        readings: dict[str, float] = {}
        for probe in list(self._probes):
            try:
                readings |= probe.read()
            except Exception as error:  # noqa: BLE001 - a measurement must not end a run
                self._probes.remove(probe)
                kind = type(probe).__name__
                warn_once(kind, f"{kind} is left out: {reason(error)}")
        return Sample(self._clock(), readings)
