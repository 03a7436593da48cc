"""Where a step's time goes: marks at the borders of its parts, on a clock that may be the device's own.

A mark costs what reading the clock costs. What lies between two marks is worked out later, in bunches: on CUDA a mark
is an event in the stream, and nobody ever waits for it. Because every moment of a step lies between two marks, the
parts add up to the step by construction.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

PARTS = ("data_wait", "transfer", "forward", "backward", "optimizer", "other")
PAUSE = "pause"  # validation, checkpoints and the like: not training time


class Clock(Protocol):
    """Where marks come from."""

    def mark(self) -> Any:
        """A moment."""

    def ready(self, mark: Any) -> bool:
        """Whether the moment has come, so that reading it makes nobody wait."""

    def wait(self, mark: Any) -> None:
        """Wait until the moment has come; only for when training is over."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments that have come."""

    def reuse(self, mark: Any) -> None:
        """A mark that is not needed any more."""


class HostClock:
    """The host's monotonic clock; the right one where operations are done when their call returns (CPU)."""

    mark = staticmethod(time.perf_counter)

    def ready(self, mark: float) -> bool:
        """Always: the past has come."""
        return True

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""

    def elapsed_ms(self, start: float, end: float) -> float:
        """Milliseconds between two readings."""
        return (end - start) * 1e3

    def reuse(self, mark: float) -> None:
        """A float needs no reuse."""


class CudaClock:
    """Events in the current CUDA stream: the time at which the device came by, not at which the host asked for it.

    Where the host is late the device waits for it between two events, and that wait is in the part in which it was
    late; where the host is ahead its own time is hidden behind the device's, as it is in the wall time.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Record an event; no host or device waits."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ready(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come by."""
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait for the device, at the end of a training."""
        mark.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds on the device, at a resolution of about half a microsecond."""
        return start.elapsed_time(end)

    def reuse(self, mark: torch.cuda.Event) -> None:
        """Events are kept and recorded again: creating one costs more than recording it."""
        self._free.append(mark)


def clock_for(device: torch.device) -> Clock:
    """The device's own clock on CUDA, the host's elsewhere; MPS has timing events, too, which wait to be tried on a Mac."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass
class Step:
    """The marks of one batch: `(part that begins here, moment)`, and what the batch held."""

    marks: list[tuple[str, Any]] = field(default_factory=list)
    samples: int = 0
    timesteps: int = 0
    global_step: int = 0
    trained: bool = False  # whether it came to its end

    def parts_ms(self, clock: Clock) -> dict[str, float]:
        """Milliseconds of every part; their sum is the step's time without pauses."""
        parts = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if part != PAUSE:
                parts[part] += clock.elapsed_ms(start, end)
        return parts


class Stopwatch:
    """Marks the parts of one step after the other; parts may be nested, and time belongs to the innermost.

    Args:
        clock: where marks come from.
        listener: is told whenever training time begins (True) and ends (False): where a step begins that does not
            adjoin another, at either side of a pause, and where a step ends. It acts outside of that time.
    """

    def __init__(self, clock: Clock, listener: Callable[[bool], None] = lambda running: None):
        self.clock = clock
        self._listener = listener
        self._running = False
        self.finished: deque[Step] = deque()  # steps whose end has been marked, oldest first
        self.current: Step | None = None
        self._stack: list[str] = []
        self._adjoining = False

    def begin_step(self) -> None:
        """A step ends where the next one begins: no moment between them is lost."""
        self._end()
        self._run(True)
        # The border's mark is shared, unless there is no step before.
        border = self.finished[-1].marks[-1][1] if self._adjoining else self.clock.mark()
        self._adjoining = False
        self.current = Step(marks=[("other", border)])

    def end_step(self) -> None:
        """End the step without beginning another."""
        self._end()
        self._adjoining = False
        self._run(False)

    def enter(self, part: str) -> None:
        """A part begins; within a pause nothing does."""
        self._stack.append(part)
        self._mark()

    def leave(self, part: str) -> None:
        """A part ends. One that was not entered in this step (it began before it) is nobody's."""
        if self._stack and self._stack[-1] == part:
            self._stack.pop()
            self._mark()

    def _mark(self) -> None:
        if self.current is None:
            return
        part = PAUSE if PAUSE in self._stack else (self._stack[-1] if self._stack else "other")
        if self.current.marks[-1][0] == part:
            return
        if part != PAUSE:
            self._run(True)
        self.current.marks.append((part, self.clock.mark()))
        if part == PAUSE:
            self._run(False)

    def _end(self) -> None:
        self._adjoining = self.current is not None and self.current.marks[-1][0] != PAUSE
        if self.current is not None:
            self.current.marks.append((PAUSE, self.clock.mark()))
            self.finished.append(self.current)
        self.current = None
        self._stack = []

    def _run(self, running: bool) -> None:
        if running != self._running:
            self._running = running
            self._listener(running)
