"""Turns: a run of a sweep waits between two updates until the sweep gives it its next turn.

The sweep holds the other ends of two pipes, whose numbers are in the environment. The run says that it is ready before
its first batch. Then the sweep writes a line for all that the run may do: `warm up`, `go <round> <seconds>` for a turn, or
`stop <reason>`. The run answers each with a line of JSON: of a turn, what it has measured. Where the sweep's end is closed,
the run waits no more: a signal that ends it is on its way (sweep/job.py).
"""

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from ..hardware.contention import cpu_seconds
from ..ranks import TURNS
from ._exclusions import measuring
from .throughput import ThroughputMonitor

MIN_STEPS = 1  # of a turn, however long they are
SHORT_S = 0.1  # the first one of such steps is left out: what others trained meanwhile is in the caches


class Turns(Callback):
    """Trains in turns. It stands behind the ThroughputMonitor that measures, and before what ends the run.

    Args:
        monitor: that measures the steps of each turn as a stretch.
        read, write: the run's ends of the pipes.

    `waited_s` are the seconds in which the run has waited.
    """

    def __init__(self, monitor: ThroughputMonitor, read: int, write: int):
        self._monitor = monitor
        self._lines = os.fdopen(read, "rb")
        self._write = write
        self._is_ready = self._is_warm = self._left = False
        self._is_short = True
        self._turn: tuple[int, float] | None = None  # whose stretch has not begun yet
        self.waited_s = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        if self._monitor.measurement:
            self._monitor.measurement.stretches.by_turns = True  # none begins before the first turn

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._is_ready and self._monitor.measurement:  # the memory of a step has been counted by now
            self._is_ready = True
            self._tell({"ready": True})
            self._wait(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        measurement = self._monitor.measurement
        if self._left or measurement is None or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        if not self._is_warm:
            if measurement.updates >= measurement.stretches.first:
                self._is_warm = True
                measurement.end()  # the step ends here: the next one does not adjoin it
                self._tell({"warm": True})
                self._wait(trainer)
        elif self._turn:
            self._begin(*self._turn)
        elif measurement.updates - self._first >= MIN_STEPS and time.perf_counter() >= self._until:
            self._monitor.end_stretch(trainer)
            facts = measurement.last_stretch()
            self._is_short = facts.get("median_s", 0.0) < SHORT_S
            self._tell(facts | {"samples": measurement.samples()})
            self._wait(trainer)

    def _begin(self, number: int, seconds: float) -> None:
        """Begin the stretch of a turn."""
        measurement = self._monitor.measurement
        assert measurement is not None
        measurement.end()
        self._turn, self._first = None, measurement.updates
        self._monitor.begin_stretch(number)
        self._until = time.perf_counter() + seconds

    def _tell(self, facts: dict[str, Any]) -> None:
        try:
            os.write(self._write, json.dumps(facts).encode() + b"\n")
        except OSError:  # the sweep has ended
            self._left = True

    def _wait(self, trainer: Trainer) -> None:
        """Wait for the next turn; the time, and what the processor does meanwhile, is in no step and no rate."""
        measurement = self._monitor.measurement
        assert measurement is not None
        before, began = cpu_seconds(), time.perf_counter()
        with measuring(trainer):
            order, _, rest = self._lines.readline().decode().strip().partition(" ")
        measurement.leave_out(before, cpu_seconds())
        self.waited_s += time.perf_counter() - began
        if order == "warm":
            return
        if order == "go":
            number, seconds = rest.split()
            if self._is_short:
                self._turn = int(number), float(seconds)  # after the next update
            else:
                self._begin(int(number), float(seconds))
            return
        self._left = True
        if order == "stop":
            measurement.ended = rest
            trainer.should_stop = True
        else:
            measurement.stretches.by_turns = False


def seconds_waited(callbacks: Iterable[Any]) -> float:
    """How long a run has waited for its turns."""
    return sum(callback.waited_s for callback in callbacks if isinstance(callback, Turns))


def turns_of(callbacks: Iterable[Callback]) -> list[Callback]:
    """What makes a run take turns, where the sweep that started this process has asked for it."""
    ends = os.environ.pop(TURNS, None)  # what the run starts takes no turns
    monitors = [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
    if ends is None or not monitors:
        return []
    read, write = map(int, ends.split(","))
    return [Turns(monitors[0], read, write)]
