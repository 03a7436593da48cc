"""The windows of a run: successive updates of a quarter of a second or more, or a visit of a sweep, each with what others took of the processor."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from ..hardware.processor import NoiseMeter, is_disturbed, slowing_share

MIN_WINDOW_S = 0.25  # the shortest by the clock: the system counts ticks of 10 ms, of which a shorter one has too few
_GROWTH = 0.02  # of the time so far: a long run has longer windows instead of more and more of them
NO_PASS = -1

Read = Callable[[], float]


@dataclass
class Window:
    """Successive updates, from number `first` (counted from 0) up to `end`."""

    first: int
    pass_: int = NO_PASS  # of a sweep that visits its runs in passes
    start_unix: float = math.nan
    began: float = 0.0
    end: int | None = None  # the number of the update after its last one; None while it lasts
    seconds: float = 0.0
    others_share: float = math.nan  # of the processor: `slowing_share`
    disturbed: bool = False


class Windows:
    """Divides a run into windows, and reads at their borders, between two updates, what others took of the processor.

    Windows follow each other by the clock. In a sweep that visits its runs in passes, each visit is a window.

    Args:
        first: the update (counted from 0) before which the first window begins: those before are warm-up.
        clock: the time.
        device: the kind that trains.
    """

    def __init__(self, first: int, clock: Read = time.perf_counter, device: str = "cpu"):
        self.all: list[Window] = []
        self.in_passes = False
        self.first = first
        self._clock, self._device = clock, device
        self._began = clock()
        self._meter: NoiseMeter | None = None

    @property
    def current(self) -> Window | None:
        """The one that lasts."""
        return self.all[-1] if self.all and self.all[-1].end is None else None

    def is_due(self, update: int) -> bool:
        """Whether a window should end or begin before this update."""
        if self.in_passes or update < self.first:
            return False
        current, now = self.current, self._clock()
        if current is None:
            return True
        return update > current.first and now - current.began >= max(MIN_WINDOW_S, _GROWTH * (now - self._began))

    def begin(self, update: int, pass_: int = NO_PASS) -> None:
        """Begin a window with this update; the one that lasts ends."""
        adjoins = self.current is not None
        self.end(update)
        if self._meter is None:
            self._meter = NoiseMeter()
        elif not adjoins:
            self._meter.read()  # what happened since the last window is in none
        self.all.append(Window(update, pass_, time.time(), self._clock()))

    def end(self, update: int) -> Window | None:
        """End the window that lasts before this update, and return it. One without an update is dropped."""
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

    def of_updates(self, numbers: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """The index of the window of each update, by their numbers (N,); -1 for one in none."""
        if not self.all:
            return numpy.full(len(numbers), -1)
        found = numpy.searchsorted([window.first for window in self.all], numbers, "right") - 1
        ends = numpy.array([numpy.inf if window.end is None else window.end for window in self.all])
        return numpy.where(numbers < ends[found], found, -1)

    def disturbed(self) -> NDArray[numpy.bool_]:
        """Which windows were disturbed, shape (W,); the one that lasts is not known to be."""
        return numpy.array([window.disturbed for window in self.all], bool)

    def facts(self) -> dict[str, Any]:
        """For the run's summary: how many windows there are, how many disturbed, and the share of others over all of them."""
        ended = [window for window in self.all if window.end is not None]
        if not ended:
            return {}
        facts: dict[str, Any] = {"windows": len(ended), "disturbed_windows": sum(window.disturbed for window in ended)}
        told = [window for window in ended if not math.isnan(window.others_share)]
        if total := sum(window.seconds for window in told):
            facts["others_share"] = sum(window.others_share * window.seconds for window in told) / total
        return facts
