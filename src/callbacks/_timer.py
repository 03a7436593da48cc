"""StepTimer: where a step's time goes, by marks at the borders of its parts on the clock of the device that trains.

A mark costs what reading the clock costs. The time between two marks is computed later, many steps at once: on CUDA a
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
_CYCLES_PER_S = 3e9  # above the highest clock of a GPU: at a lower one it is held for longer
_COLUMN = {part: column for column, part in enumerate(TIMED)}


class HostClock:
    """The source of marks: here the host's monotonic clock, for devices whose operations end with their call (CPU).

    Attributes:
        lags: whether the device runs behind the host.
        can_hold: whether it can be told to wait.
        parts: of a step that it can time; the time of the others is in `other`.
    """

    lags = can_hold = False
    parts: Sequence[str] = PARTS

    mark: Any = staticmethod(time.perf_counter)

    def ready(self, mark: Any) -> bool:
        """Whether the moment has passed on the device, so that reading the mark does not wait."""
        return True

    def wait(self, mark: Any) -> None:
        """Wait until the moment has passed; only for the end of a training or a checkpoint."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments that have passed."""
        return (end - start) * 1e3

    def spans_ms(self, moments: Sequence[Any]) -> list[float]:
        """Milliseconds between each of some moments that have passed and the next one."""
        return [(end - start) * 1e3 for start, end in itertools.pairwise(moments)]

    def reuse(self, marks: Iterable[Any]) -> None:
        """Take back marks that are no longer needed."""

    def pace(self, is_last: bool) -> None:
        """Before the mark at a batch's end: bring the host near the device, where the marks are the host's."""

    def hold(self, seconds: float) -> None:
        """Have the device wait for about so long before what is submitted next."""


class CudaClock(HostClock):
    """Events in the current CUDA stream: the time at which the device reaches the mark.

    Where the host is late, the device idles between two events, and the idle time is in the part that was late. Where
    the host is ahead, its own time is hidden behind the device's, as it is in the wall time.
    """

    lags = True
    can_hold = torch.version.hip is None  # the counter of some AMD devices has another rate

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
    """The host's clock, with the host kept one batch ahead of the device at most: so the steps are as long as the device's.

    `torch.mps`'s timing events do not serve: `elapsed_time` waits for all that was submitted, blocks for ever if an event is
    the end of two intervals, and reads the time at which a thread of the host heard of the event. So nobody knows how long
    the parts take in which the host submits work. An event without timing is waited for without stopping the device.
    """

    lags = True
    parts = (StepPart.DATA_WAIT.value, OTHER)

    def __init__(self) -> None:
        self._before: torch.mps.Event | None = None  # at the end of the batch before

    @override
    def pace(self, is_last: bool) -> None:
        """Wait until the device has ended the batch before, or all batches: then the next one begins on an idle device."""
        event = torch.mps.Event()
        event.record()
        waited_for, self._before = (event, None) if is_last else (self._before, event)
        if waited_for is not None:
            waited_for.synchronize()


def clock_for(device: torch.device) -> HostClock:
    """The device's clock on CUDA, the host's elsewhere."""
    return {"cuda": CudaClock, "mps": MpsClock}.get(device.type, HostClock)()


@dataclass(slots=True)
class Batch:
    """The marks of one batch, and what it holds. A mark is a part that begins and the moment at which it does."""

    parts: list[str]
    moments: list[Any]
    samples: int = 0
    timesteps: int = 0
    global_step: int = 0  # Lightning's, after the batch
    trained: bool = False  # whether on_train_batch_end was reached
    recorded: bool = False  # whether its operations were recorded, which makes it slower
    waits: list[Any] = field(default_factory=list)  # for other ranks, within its parts: start, end, start, end, …

    def waits_ms(self, clock: HostClock) -> float:
        """Milliseconds of waiting for other ranks; 0 where it is not measured."""
        return sum(map(clock.elapsed_ms, self.waits[::2], self.waits[1::2]))


def parts_ms(batches: Sequence[Batch], clock: HostClock) -> NDArray[numpy.float64]:
    """Milliseconds of each part in `TIMED`, a row a batch: shape (N, 7). The step's time is the sum of the first six."""
    places, ms = [], []
    for row, batch in enumerate(batches):
        places += [row * len(TIMED) + _COLUMN[part] for part in batch.parts[:-1]]  # the last one is the batch's end
        ms += clock.spans_ms(batch.moments)
    sums: NDArray = numpy.bincount(numpy.array(places, int), ms, len(batches) * len(TIMED))
    return sums.reshape(len(batches), len(TIMED))


class StepTimer:
    """Marks the parts of one batch after the other. Parts may be nested; time belongs to the innermost one.

    Attributes:
        finished: batches whose end has been marked, oldest first.
        current: the batch that is being timed; None between two epochs.
        updates: of the fit.
    """

    def __init__(self, clock: HostClock, last_step: int = 0):
        self.clock = clock
        self._timed = {*clock.parts, PAUSE}
        self.finished: deque[Batch] = deque()
        self.current: Batch | None = None
        self.updates = Updates(last_step)
        self._stack: list[str] = []

    @property
    def part(self) -> str:
        """The part of the step that runs now."""
        stack = self._stack
        if not stack:
            return OTHER
        return PAUSE if PAUSE in stack else stack[-1]

    def begin_batch(self) -> None:
        """Begin a batch where the one before ends, so that no moment between them is lost."""
        adjoins = self._end()
        self.current = Batch([OTHER], [self.finished[-1].moments[-1] if adjoins else self.clock.mark()])

    def end_batch(self, global_step: int) -> None:
        """The batch has been trained, and Lightning has counted its update, if it made one."""
        if self.current is not None:
            self.current.global_step, self.current.trained = global_step, True
            self.updates.end_batch(global_step)

    def settle(self) -> None:
        """Before a pause that ends the step: where the marks are the host's, the step has what the device still computes."""
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
        """End a part. A part that was not entered in this step is ignored."""
        if self._stack and self._stack[-1] == part:
            self._stack.pop()
            self._mark()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude what happens within from the step. May be nested."""
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
        if part not in self._timed:  # nobody can time it
            part = OTHER
        if batch.parts[-1] == part:
            return
        batch.parts.append(part)
        batch.moments.append(self.clock.mark())

    def _end(self, is_last: bool = False) -> bool:
        """End the batch. Returns whether the next one may begin at its end."""
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
    """Have every `pause(trainer)` happen within `timer.pause()`, as long as there is the timer."""
    _timers.setdefault(trainer, WeakSet()).add(timer)


@contextlib.contextmanager
def pause(trainer: Trainer) -> Iterator[None]:
    """Work that is not training: whoever times the trainer's steps leaves it out of them."""
    with contextlib.ExitStack() as stack:
        for timer in [*_timers.get(trainer, ())]:
            stack.enter_context(timer.pause())
        yield
