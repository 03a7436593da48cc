"""Where a step's time goes: marks at the borders of its parts, on the clock of the device that trains.

A mark costs what reading the clock costs. The time between two marks is computed later, many steps at once: on CUDA a
mark is an event in the stream, and nothing waits for it. Every moment of a step lies between two marks, so the parts
add up to the step by construction.
"""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from typing_extensions import override

from ..records.step_parts import PARTS, StepPart

OTHER = StepPart.OTHER.value
PAUSE = "pause"  # validation, checkpoints and the like: excluded from the step
WRITING = "writing"  # computing and writing the curves of many steps: excluded, while the device is sampled on

# The first profiled action of a validation, which ends with on_validation_end.
VALIDATION = "on_validation_model_zero_grad"
# A user's hooks around the copy of a batch. They prepare it, as a loader does: their time is in `data_wait`, and beside the
# parts under their names.
PREPARING = ("on_before_batch_transfer", "on_after_batch_transfer")
# The endings of Lightning's profiler actions → the part of the step that the action is.
PARTS_OF_ACTIONS = {
    "train_dataloader_next": "data_wait",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": PAUSE,
    VALIDATION: PAUSE,
    **{hook: hook for hook in PREPARING},
}


class Clock:
    """The source of marks: here the host's monotonic clock, for devices whose operations end with their call (CPU)."""

    mark: Any = staticmethod(time.perf_counter)

    def ready(self, mark: Any) -> bool:
        """Whether the moment has passed on the device, so that reading the mark does not wait."""
        return True

    def wait(self, mark: Any) -> None:
        """Wait until the moment has passed; only for the end of a training or a checkpoint."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments that have passed."""
        return (end - start) * 1e3

    def reuse(self, marks: Iterable[Any]) -> None:
        """Take back marks that are no longer needed."""


class CudaClock(Clock):
    """Events in the current CUDA stream: the time at which the device reaches the mark.

    Where the host is late, the device idles between two events, and the idle time is in the part that was late. Where
    the host is ahead, its own time is hidden behind the device's, as it is in the wall time.
    """

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
    def reuse(self, marks: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(marks)  # creating an event costs more than recording it again


def clock_for(device: torch.device) -> Clock:
    """The device's clock on CUDA, the host's elsewhere. MPS has timing events that were never confirmed on a Mac."""
    return CudaClock() if device.type == "cuda" else Clock()


@dataclass(slots=True)
class Step:
    """The marks of one batch, and what the batch holds. A mark is a part that begins and the moment at which it does."""

    parts: list[str]
    moments: list[Any]
    samples: int = 0
    timesteps: int = 0
    global_step: int = 0
    trained: bool = False  # whether on_train_batch_end was reached
    watched: bool = False  # whether its operations were recorded, which makes it slower

    @property
    def end(self) -> Any:
        """The last moment."""
        return self.moments[-1]


MEASURED = (*PARTS, WRITING, *PREPARING)
_COLUMNS = {part: column for column, part in enumerate((*MEASURED, PAUSE))}


def parts_ms(steps: Sequence[Step], clock: Clock) -> NDArray[numpy.float64]:
    """Milliseconds of each part in `MEASURED`, a row a step: shape (N, 9). The step's time is the sum of the first six.

    The hooks in `PREPARING` count as waiting for data, and beside it.
    """
    places, ms = [], []
    for row, step in enumerate(steps):
        places += [row * len(_COLUMNS) + _COLUMNS[part] for part in step.parts[:-1]]  # the last one is the step's end
        ms += [clock.elapsed_ms(start, end) for start, end in itertools.pairwise(step.moments)]
    sums: NDArray = numpy.bincount(numpy.array(places, int), ms, len(steps) * len(_COLUMNS))
    found = sums.reshape(len(steps), len(_COLUMNS))[:, : len(MEASURED)]
    found[:, _COLUMNS[StepPart.DATA_WAIT]] += found[:, [_COLUMNS[hook] for hook in PREPARING]].sum(1)
    return found


class Stopwatch:
    """Marks the parts of one step after the other. Parts may be nested; time belongs to the innermost one.

    `on_running` is called with True when training time begins and with False when it ends: at a step that does not
    adjoin another, at either side of a pause, and at the end of a step. Its own time is excluded.
    """

    def __init__(self, clock: Clock, on_running: Callable[[bool], None] = lambda running: None):
        self.clock = clock
        self.finished: deque[Step] = deque()  # steps whose end has been marked, oldest first
        self.current: Step | None = None
        self.measuring_seconds = 0.0  # within `excluding(PAUSE)`, on the host's clock
        self._on_running = on_running
        self._running = False
        self._stack: list[str] = []

    @property
    def part(self) -> str:
        """The part of the step that runs now."""
        stack = self._stack
        if not stack:
            return OTHER
        return PAUSE if PAUSE in stack else stack[-1]

    def begin_step(self) -> None:
        """Begin a step where the one before ends, so that no moment between them is lost."""
        adjoins = self._end()
        self._set_running(True)
        self.current = Step([OTHER], [self.finished[-1].end if adjoins else self.clock.mark()])

    def end_step(self) -> None:
        """End the step without beginning another."""
        self._end()
        self._set_running(False)

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
    def excluding(self, part: str) -> Iterator[None]:
        """Exclude what happens within, as `PAUSE` or `WRITING`. It may lie within a pause, and writing may be nested."""
        began = time.perf_counter()
        self.enter(part)
        try:
            yield
        finally:
            self.leave(part)
            if part == PAUSE:
                self.measuring_seconds += time.perf_counter() - began

    def _mark(self) -> None:
        step, part = self.current, self.part
        if step is None or step.parts[-1] == part:
            return
        if part != PAUSE and not self._running:
            self._set_running(True)
        step.parts.append(part)
        step.moments.append(self.clock.mark())
        if part == PAUSE:
            self._set_running(False)

    def _end(self) -> bool:
        """End the step. Returns whether the next one may begin at its end."""
        step, self.current, self._stack = self.current, None, []
        if step is None:
            return False
        adjoins = step.parts[-1] != PAUSE
        step.parts.append(PAUSE)
        step.moments.append(self.clock.mark())
        self.finished.append(step)
        return adjoins

    def _set_running(self, running: bool) -> None:
        if running != self._running:
            self._running = running
            self._on_running(running)
