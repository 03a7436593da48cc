"""The windows of a run, each with other programs' share of the processor: updates of 0.25 s or more, or a sweep's visit."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from ..hardware.processor import NoiseMeter, is_disturbed, slowing_share

MIN_WINDOW_S = 0.25  # the shortest window by the clock: in a shorter one the system's ticks of 10 ms are too coarse
_GROWTH = 0.02  # of the time so far: the windows of a long run grow, so that their number does not
NO_PASS = -1

Clock = Callable[[], float]


@dataclass
class Window:
    """Successive updates, from number `first` (counted from 0) up to `end`."""

    first: int
    pass_: int = NO_PASS  # the sweep's pass to which a visit belongs
    start_unix: float = math.nan
    began: float = 0.0
    end: int | None = None  # the number of the update after the last one; None while the window lasts
    seconds: float = 0.0
    others_share: float = math.nan  # of the processor: `slowing_share`
    disturbed: bool = False


class Windows:
    """Divides a run into windows, and reads other programs' processor share at their borders, between two updates.

    Windows follow each other by the clock. In a sweep that visits its runs in passes, each visit is a window.

    Args:
        first_update: the update (counted from 0) with which the first window begins; earlier ones are warm-up.
        clock: returns the time in seconds.
        device: the type of the device that trains.
    """

    def __init__(self, first_update: int, clock: Clock = time.perf_counter, device: str = "cpu"):
        self.all: list[Window] = []
        self.in_passes = False  # whether each window is a visit, which the clock neither begins nor ends
        self.first_update = first_update
        self._clock, self._device = clock, device
        self._start = clock()
        self._meter: NoiseMeter | None = None

    @property
    def current(self) -> Window | None:
        """Return the window that has begun and not ended."""
        return self.all[-1] if self.all and self.all[-1].end is None else None

    def is_due(self, update: int) -> bool:
        """Whether the clock ends or begins a window before this update."""
        if self.in_passes or update < self.first_update:
            return False
        current, now = self.current, self._clock()
        if current is None:
            return True
        return update > current.first and now - current.began >= max(MIN_WINDOW_S, _GROWTH * (now - self._start))

    def begin(self, update: int, pass_: int = NO_PASS) -> None:
        """Begin a window with this update, and end the current one."""
        adjoins = self.current is not None
        self.end(update)
        if self._meter is None:
            self._meter = NoiseMeter()
        elif not adjoins:
            self._meter.read()  # leave the time since the last window out
        self.all.append(Window(update, pass_, time.time(), self._clock()))

    def end(self, update: int) -> Window | None:
        """End the current window before this update, and return it. Drop a window without an update."""
        current = self.current
        if current is None or self._meter is None:
            return None
        noise = self._meter.read()
        current.end, current.seconds = update, self._clock() - current.began
        current.others_share, current.disturbed = slowing_share(noise, self._device), is_disturbed(noise)
        if update <= current.first:
            self.all.pop()
            return None
        return current

    def window_indices(self, numbers: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """Return the index of the window of each update, given the updates' numbers (N,); -1 for one in no window."""
        if not self.all:
            return numpy.full(len(numbers), -1)
        indices = numpy.searchsorted([window.first for window in self.all], numbers, "right") - 1
        ends = numpy.array([numpy.inf if window.end is None else window.end for window in self.all])
        return numpy.where(numbers < ends[indices], indices, -1)

    def disturbed(self) -> NDArray[numpy.bool_]:
        """Return which windows were disturbed, shape (W,); False for the current one."""
        return numpy.array([window.disturbed for window in self.all], bool)

    def summarize(self) -> dict[str, Any]:
        """Return the numbers of windows and of disturbed ones, and the mean share of others, for the run's summary."""
        ended = [window for window in self.all if window.end is not None]
        if not ended:
            return {}
        counts: dict[str, Any] = {"windows": len(ended), "disturbed_windows": sum(window.disturbed for window in ended)}
        measured = [window for window in ended if not math.isnan(window.others_share)]
        if total := sum(window.seconds for window in measured):
            counts["others_share"] = sum(window.others_share * window.seconds for window in measured) / total
        return counts
