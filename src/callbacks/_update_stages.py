"""Which updates of a training are left out, timed as they are, recorded, and profiled, and how long those as they are take."""

import contextlib
import time
from collections.abc import Iterator
from enum import Enum, auto
from statistics import mean, median
from typing import Any

import numpy
import torch
from lightning import Trainer

from ._profiler_hook import attach_profiler_hook, detach_profiler_hook

_RECORDED = 3  # updates whose operations are noted; a time is the median of them
_FEWEST_WARMUP = 4
_LONGEST_WARMUP_S = 15
_PLAIN, _FEWEST_PLAIN, _LONGEST_PLAIN_S = 10, 5, 3  # from 10 updates on a bottleneck can be clear
_PROFILED = 5
_MOST_EVENTS = 300_000  # operations in a profile: reading one takes some seconds and 1 GiB


class Stage(Enum):
    """What is done with an update."""

    WARMUP = auto()
    PLAIN = auto()
    RECORDED = auto()
    PROFILED = auto()
    DONE = auto()


class UpdateStages:
    """Gives each update its stage, and times the plain ones from the start of one to the start of the next.

    An asynchronous device is awaited before the first plain update and after the last one.

    Args:
        warmup: updates to leave out.
        steps: plain updates, and at most profiled ones. None is 10 plain ones (fewer, but 5, if they take more than 3 s)
            and 5 profiled ones.
    """

    def __init__(self, warmup: int, steps: int | None, device: torch.device):
        self.stage = Stage.WARMUP
        self._left = most_updates(warmup, steps)
        self._warmup, self._device, self._may_shorten = warmup, device, steps is None
        self._began = self._plain_began = time.perf_counter()
        self._start = self._batch_end = self._between = 0.0
        self._waited = self._waiting = self._wait_start = 0.0  # for data: until the batch before, and since then
        self._interrupted = False
        # Seconds of a plain update, of it between batches, and of these waiting for data.
        self.intervals: list[tuple[float, float, float]] = []

    def begin(self, operations: int) -> None:
        """An update begins, where a recorded one has so many operations (0 if unknown)."""
        before = self.stage
        self._choose(operations)
        if Stage.PLAIN in (before, self.stage) and before is not self.stage:
            synchronize(self._device)
        now = time.perf_counter()
        if before is Stage.WARMUP:
            self._plain_began = now
        if before is Stage.PLAIN:
            end, waiting = (self._batch_end, 0.0) if self._interrupted else (now, self._waiting)
            between = self._between + end - self._batch_end
            self.intervals.append((end - self._start, between, self._waited + waiting))
        self._start, self._between, self._batch_end, self._interrupted = now, 0.0, now, False
        self._waited = self._waiting = 0.0

    def begin_batch(self) -> None:
        """A batch of the update is there."""
        self._between += time.perf_counter() - self._batch_end
        self._waited, self._waiting = self._waited + self._waiting, 0.0

    def end_batch(self, is_last: bool) -> None:
        """A batch has been trained; the last one of an update has changed the weights."""
        self._batch_end = time.perf_counter()
        if is_last:
            self._left[self.stage] -= 1

    def begin_wait(self) -> None:
        """The loader is asked for the next batch."""
        self._wait_start = time.perf_counter()

    def end_wait(self) -> None:
        """The loader has given the batch."""
        self._waiting += time.perf_counter() - self._wait_start

    def leave_out(self) -> None:
        """Something else than training happens before the next update begins: this one ended with its batch."""
        self._interrupted = True

    def skip_profile(self) -> None:
        """Profile no update."""
        self._left[Stage.PROFILED] = 0

    @property
    def is_complete(self) -> bool:
        """Whether no update is left to be measured."""
        return self._left[Stage.PROFILED] <= 0

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    def facts(self) -> dict[str, Any]:
        """Of the plain updates: how many, the time of one, of it that between batches, of this that of waiting for data.

        `spread` is the 90th percentile ÷ the median. A device that is awaited only after the last update makes the sum of
        the updates true, and no single one: then the times are means, and the spread is not known.
        """
        is_cpu = self._device.type == "cpu"
        times = [(median if is_cpu else mean)(each) for each in zip(*self.intervals, strict=True)]
        middle, high = numpy.quantile([each[0] for each in self.intervals], (0.5, 0.9))
        facts = dict(zip(("step_seconds", "between_seconds", "waiting_seconds"), times, strict=True))
        return {**facts, "steps": len(self.intervals), "spread": float(high / middle) if is_cpu else 1.0}

    def _choose(self, operations: int) -> None:
        done = self._warmup - self._left[Stage.WARMUP]
        if done >= _FEWEST_WARMUP and self.elapsed() > _LONGEST_WARMUP_S:
            self._left[Stage.WARMUP] = 0
        is_long = self.stage is Stage.PLAIN and time.perf_counter() - self._plain_began > _LONGEST_PLAIN_S
        if self._may_shorten and is_long and len(self.intervals) >= _FEWEST_PLAIN - 1:  # the last one is not added yet
            self._left[Stage.PLAIN] = 0
        if operations:
            most = max(1, _MOST_EVENTS // operations)
            self._left[Stage.PROFILED] = min(self._left[Stage.PROFILED], most)
        self.stage = next((stage for stage, left in self._left.items() if left > 0), Stage.DONE)


def most_updates(warmup: int, steps: int | None) -> dict[Stage, int]:
    """The updates of every stage, if none is shortened."""
    plain, profiled = (_PLAIN, _PROFILED) if steps is None else (steps, steps)
    return {Stage.WARMUP: warmup, Stage.PLAIN: plain, Stage.RECORDED: _RECORDED, Stage.PROFILED: profiled}


@contextlib.contextmanager
def time_loader(trainer: Trainer, stages: UpdateStages) -> Iterator[None]:
    """Time the waits for the training loader."""
    endings = frozenset({"train_dataloader_next"})
    hook = attach_profiler_hook(trainer, endings, lambda _: stages.begin_wait(), lambda _: stages.end_wait())
    try:
        yield
    finally:
        detach_profiler_hook(trainer, hook)


def synchronize(device: torch.device) -> None:
    """Wait for an asynchronous device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
