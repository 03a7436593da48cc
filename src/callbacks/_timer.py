"""StepTimer: times the parts of a step, by marks at their borders on the clock of the device that trains.

A mark costs as much as reading the clock. The time between two marks is computed later, for many steps at once: on CUDA a
mark is an event in the stream, and nothing waits for it. Every moment of a step lies between two marks, so the parts
add up to the step by construction. On MPS the host's clock is used, and few parts can be timed (`MpsClock`).
"""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy
import torch
from lightning import Trainer
from numpy.typing import NDArray
from typing_extensions import override

from ..records.step_parts import PARTS, StepPart
from ._updates import Updates

OTHER = StepPart.OTHER.value
PAUSE = "pause"  # what is not training: validation, checkpoints, and everything within `pause`
TIMED = (*PARTS, PAUSE)
_CYCLES_PER_S = 3e9  # above the highest clock of a GPU; at a lower clock the device is held for longer
_COLUMN = {part: column for column, part in enumerate(TIMED)}


class HostClock:
    """The source of marks: here the host's monotonic clock, for devices whose operations end with their call (CPU).

    Attributes:
        lags: whether the device runs behind the host.
        can_hold: whether the device can be held, by `hold`.
        parts: the parts of a step that can be timed; the time of all others counts as `other`.
    """

    lags = can_hold = False
    parts: Sequence[str] = PARTS

    mark: Any = staticmethod(time.perf_counter)

    def ready(self, mark: Any) -> bool:
        """Whether the device has passed the mark, so that reading it does not wait."""
        return True

    def wait(self, mark: Any) -> None:
        """Wait until the device has passed the mark; only for the end of a training or a checkpoint."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks that have passed."""
        return (end - start) * 1e3

    def spans_ms(self, moments: Sequence[Any]) -> list[float]:
        """Return the milliseconds between each mark and the next one; all have passed."""
        return [(end - start) * 1e3 for start, end in itertools.pairwise(moments)]

    def reuse(self, marks: Iterable[Any]) -> None:
        """Take back marks that are no longer needed, to record them again."""

    def pace(self, is_last: bool) -> None:
        """Wait for a lagging device before the mark at a batch's end, where marks are times of the host."""

    def hold(self, seconds: float) -> None:
        """Have the device wait for about so many seconds before the operations that are submitted next."""


class CudaClock(HostClock):
    """Marks with events in the current CUDA stream: a mark's time is that at which the device reaches it.

    Where the host is late, the device idles between two events, and the idle time counts for the part that was late. Where
    the host is ahead, its own time is hidden behind the device's, as in the wall time.
    """

    lags = True
    can_hold = torch.version.hip is None  # the cycle counter of some AMD devices has another rate

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    @override
    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @override
    def ready(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    @override
    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    @override
    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)  # at a resolution of about 0.5 µs

    @override
    def spans_ms(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        return [self.elapsed_ms(start, end) for start, end in itertools.pairwise(moments)]

    @override
    def reuse(self, marks: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(marks)  # creating an event costs more than recording it again

    @override
    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(_CYCLES_PER_S * seconds))


class MpsClock(HostClock):
    """The host's clock, with the host kept at most one batch ahead, so that steps are as long on the host as on the device.

    The timing events of `torch.mps` are unsuitable: `elapsed_time` waits for all submitted work, blocks forever if an event
    ends two intervals, and reads the time at which a host thread was notified of the event. So the parts in which the host
    submits work cannot be timed. Waiting for an event without timing does not stop the device.
    """

    lags = True
    parts = (StepPart.DATA_WAIT.value, OTHER)

    def __init__(self) -> None:
        self._last_event: torch.mps.Event | None = None  # at the end of the last batch

    @override
    def pace(self, is_last: bool) -> None:
        """Wait until the device has ended the batch before this one; with `is_last` this one too, so that the device idles."""
        event = torch.mps.Event()
        event.record()
        waited_for, self._last_event = (event, None) if is_last else (self._last_event, event)
        if waited_for is not None:
            waited_for.synchronize()


def clock_for(device: torch.device) -> HostClock:
    """Return the clock for a device: CUDA events, or the host's clock."""
    return {"cuda": CudaClock, "mps": MpsClock}.get(device.type, HostClock)()


@dataclass(slots=True)
class Batch:
    """The marks of one batch and its size. At `moments[i]` the part `parts[i]` begins."""

    parts: list[str]
    moments: list[Any]
    samples: int = 0
    timesteps: int = 0
    global_step: int = 0  # Lightning's, after the batch
    is_trained: bool = False  # whether on_train_batch_end was reached
    is_recorded: bool = False  # whether its operations were recorded, which makes it slower
    waits: list[Any] = field(default_factory=list)  # for other ranks, within the parts: marks start, end, start, end, …

    def waits_ms(self, clock: HostClock) -> float:
        """Return the milliseconds of waiting for other ranks; 0 where they are not measured."""
        return sum(map(clock.elapsed_ms, self.waits[::2], self.waits[1::2]))


def parts_ms(batches: Sequence[Batch], clock: HostClock) -> NDArray[numpy.float64]:
    """Return the milliseconds of each part in `TIMED`, a row a batch: shape (N, 7). The first six add up to the step."""
    cells, ms = [], []
    for row, batch in enumerate(batches):
        cells += [row * len(TIMED) + _COLUMN[part] for part in batch.parts[:-1]]  # the last one is the batch's end
        ms += clock.spans_ms(batch.moments)
    sums: NDArray = numpy.bincount(numpy.array(cells, int), ms, len(batches) * len(TIMED))
    return sums.reshape(len(batches), len(TIMED))


class StepTimer:
    """Marks the parts of one batch after the other. Parts may be nested; time counts for the innermost one.

    Attributes:
        finished: batches whose end has been marked, oldest first.
        current: the batch that is being timed; None between two epochs.
        updates: counts the updates of the fit.
    """

    def __init__(self, clock: HostClock, last_step: int = 0):
        self.clock = clock
        self._timed_parts = {*clock.parts, PAUSE}
        self.finished: deque[Batch] = deque()
        self.current: Batch | None = None
        self.updates = Updates(last_step)
        self._stack: list[str] = []

    @property
    def part(self) -> str:
        """Return the part of the step that runs now."""
        stack = self._stack
        if not stack:
            return OTHER
        return PAUSE if PAUSE in stack else stack[-1]

    def begin_batch(self) -> None:
        """Begin a batch at the end of the last one, so that no time between them is lost."""
        adjoins = self._end()
        self.current = Batch([OTHER], [self.finished[-1].moments[-1] if adjoins else self.clock.mark()])

    def end_batch(self, global_step: int) -> None:
        """Note that the batch was trained, with Lightning's `global_step` after it."""
        if self.current is not None:
            self.current.global_step, self.current.is_trained = global_step, True
            self.updates.end_batch(global_step)

    def settle(self) -> None:
        """Wait for a lagging device before a pause that ends the step, so that its remaining work counts for the step."""
        if self.current is not None and PAUSE not in self._stack:
            self.clock.pace(is_last=True)

    def end_step(self) -> None:
        """End the step without beginning another."""
        self._end(is_last=True)

    def enter(self, part: str) -> None:
        """Begin a part; within a pause the pause continues."""
        self._stack.append(part)
        self._mark()

    def leave(self, part: str) -> None:
        """End a part. Ignore a part that was not entered in this step."""
        if self._stack and self._stack[-1] == part:
            self._stack.pop()
            self._mark()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time within this context from the step. May be nested."""
        self.enter(PAUSE)
        try:
            yield
        finally:
            self.leave(PAUSE)

    def _mark(self) -> None:
        batch = self.current
        if batch is None:
            return
        stack = self._stack
        part = PAUSE if PAUSE in stack else stack[-1] if stack else OTHER
        if part not in self._timed_parts:  # the clock cannot time it
            part = OTHER
        if batch.parts[-1] == part:
            return
        batch.parts.append(part)
        batch.moments.append(self.clock.mark())

    def _end(self, is_last: bool = False) -> bool:
        """End the batch. Return whether the next batch may begin at its end."""
        batch, self.current, self._stack = self.current, None, []
        if batch is None:
            return False
        self.clock.pace(is_last)
        adjoins = batch.parts[-1] != PAUSE
        batch.parts.append(PAUSE)
        batch.moments.append(self.clock.mark())
        self.finished.append(batch)
        return adjoins


_timers: WeakKeyDictionary[Trainer, WeakSet[StepTimer]] = WeakKeyDictionary()


def add_timer(trainer: Trainer, timer: StepTimer) -> None:
    """Have every `pause(trainer)` also enter `timer.pause()`, as long as the timer exists."""
    _timers.setdefault(trainer, WeakSet()).add(timer)


@contextlib.contextmanager
def pause(trainer: Trainer) -> Iterator[None]:
    """Exclude the work within this context from the trainer's steps, in every timer of the trainer."""
    with contextlib.ExitStack() as stack:
        for timer in [*_timers.get(trainer, ())]:
            stack.enter_context(timer.pause())
        yield
