"""What a fit has measured: its updates in their stretches, and what they cost."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from ..hardware.contention import Load, cpu_seconds
from ._cost_summary import CostSummary, UpdateBuilder, Updates
from ._stopwatch import WRITING, Stopwatch
from ._stretches import Stretches

FLUSH_EVERY = 100  # steps computed and written together


class Measurement:
    """Counts the updates of a fit, divides them into stretches between two of them, and turns marks into numbers.

    Args:
        stopwatch: that marks the steps.
        device: that trains.
        warmup: updates that are in no summary, as far as there are more.
        watched: the last update whose operations are recorded; 0 if none are.
        last_step: Lightning's `global_step` before the fit.
        restart: called after the first update and at the end of the warm-up, to drop what was sampled before.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        device: torch.device,
        warmup: int,
        watched: int,
        last_step: int,
        restart: Callable[[], None] = lambda: None,
    ):
        self.updates = self.batches = 0
        self.stretches = Stretches(device, max(1, warmup, watched))
        self.cost = CostSummary(warmup, self.stretches)
        self.ended: str | None = None  # why a timed run has ended
        self.load_before = cpu_seconds()  # the machine's, at the beginning
        self._stopwatch = stopwatch
        self._builder = UpdateBuilder(last_step)
        self._last_step = last_step
        self._is_between_updates, self._stretches_read = True, 0
        self._restart, self._restart_after = restart, {min(1, warmup), warmup, watched} - {0}

    def begin_step(self) -> None:
        """Begin a step, and a stretch where it is time; what a stretch's border costs is in no step."""
        if self.updates in self._restart_after:
            self._restart_after.remove(self.updates)
            self._stopwatch.end_step()
            self._restart()
        if self._is_between_updates and self.stretches.is_due(self.updates):
            with self._stopwatch.excluding(WRITING):  # the device is sampled on
                self.stretches.begin(self.updates)
        self._stopwatch.begin_step()

    def end_batch(self, step: int) -> bool:
        """Lightning's `global_step` after a batch. Returns whether the marks should be read."""
        self.batches += 1
        self._is_between_updates = step != self._last_step
        self.updates += self._is_between_updates
        self._last_step = step
        return len(self._stopwatch.finished) >= FLUSH_EVERY or len(self.stretches.all) > self._stretches_read

    def read(self, wait: bool) -> tuple[NDArray[numpy.int64], Updates, NDArray[numpy.bool_]]:
        """Turn marks into numbers, as far as they can be read without waiting, or all.

        Returns the new updates: `global_step` after each (N,), the updates, and from which a rate may be read (N,).
        """
        self._stretches_read = len(self.stretches.all)
        clock, finished, steps = self._stopwatch.clock, self._stopwatch.finished, []
        if wait and finished:
            clock.wait(finished[-1].end)
        while finished and clock.ready(finished[0].end):
            steps.append(finished.popleft())
        numbers, updates = self._builder.add([step for step in steps if step.trained], clock)
        for step in steps:
            clock.reuse(step.moments[:-1])  # the last moment is the next step's first
        return numbers, updates, self.cost.add(updates)

    def end(self) -> None:
        """End the last step and the last stretch."""
        self._stopwatch.end_step()
        self.stretches.end(self.updates)

    def leave_out(self, before: Load, after: Load) -> None:
        """Leave out a time in which this run waited, when the machine's load over the fit is summed up."""
        shifted = (start + late - early for start, early, late in zip(self.load_before, before, after, strict=True))
        self.load_before = Load(*shifted)

    def samples(self) -> float | None:
        """What a whole step holds; None before the first one."""
        return self.cost.steps.whole()[0] if len(self.cost.steps) else None

    def last_stretch(self) -> dict[str, Any]:
        """Of the stretch that has ended last: `steps`, `median_s`, shares of the noise, and whether it is `disturbed`."""
        ended = [stretch for stretch in self.stretches.all if stretch.end is not None]
        return self.cost.steps.facts_of(ended[-1]) if ended else {}

    def summary(self, world_size: int, fit_seconds: float) -> dict[str, Any]:
        """The cost of the steps, what the stretches were like, and why a timed run has ended; empty without a step."""
        if cost := self.cost.summary(world_size, fit_seconds):
            return cost | self.stretches.facts() | ({"ended": self.ended} if self.ended else {})
        return cost

    def why_nothing_is_known(self) -> str:
        """Why the summary is empty."""
        if not self.batches:
            return "no batch was trained"
        if self.updates:
            return "no step has a time: the clock has jumped"
        return (
            f"of {self.batches:,} batches none ended with an optimizer step that Lightning counts; with manual optimization, "
            "step the optimizers that self.optimizers() returns"
        )
