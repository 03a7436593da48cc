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

from ..ranks import TURNS
from ._timer import pause
from .throughput import ThroughputMonitor

MIN_STEPS = 1  # of a turn, however long they are
SHORT_S = 0.1  # the first one of such steps is left out: what others trained meanwhile is in the caches


class Turns(Callback):
    """Trains in turns. It stands behind the ThroughputMonitor that measures, and before what ends the run.

    Args:
        monitor: that measures the steps of each turn as a window.
        read, write: the run's ends of the pipes.

    `waited_s` are the seconds in which the run has waited.
    """

    def __init__(self, monitor: ThroughputMonitor, read: int, write: int):
        self._monitor = monitor
        self._lines = os.fdopen(read, "rb")
        self._write = write
        self._is_ready = self._is_warm = self._left = False
        self._is_short = True
        self._turn: tuple[int, float] | None = None  # whose window has not begun yet
        self.waited_s = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        if self._monitor.is_measuring:
            self._monitor.windows.in_passes = True  # none begins before the first turn

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._is_ready and self._monitor.is_measuring:
            self._is_ready = True
            self._tell({"ready": True})
            self._wait(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        monitor = self._monitor
        if self._left or not monitor.is_measuring or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        if not self._is_warm:
            if monitor.timer.updates >= monitor.windows.first:
                self._is_warm = True
                monitor.timer.end_step()  # the next step does not adjoin this one
                self._tell({"warm": True})
                self._wait(trainer)
        elif self._turn:
            self._begin(*self._turn)
        elif monitor.timer.updates - self._first >= MIN_STEPS and time.perf_counter() >= self._until:
            facts = monitor.end_window(trainer)
            self._is_short = facts.get("median_s", 0.0) < SHORT_S
            self._tell(facts | {"samples": monitor.table.whole_batch() or None})
            self._wait(trainer)

    def _begin(self, number: int, seconds: float) -> None:
        """Begin the window of a turn."""
        self._turn, self._first = None, self._monitor.timer.updates
        self._monitor.begin_window(number)
        self._until = time.perf_counter() + seconds

    def _tell(self, facts: dict[str, Any]) -> None:
        try:
            os.write(self._write, json.dumps(facts).encode() + b"\n")
        except OSError:  # the sweep has ended
            self._left = True

    def _wait(self, trainer: Trainer) -> None:
        """Wait for the next turn; the time is in no step and no rate."""
        began = time.perf_counter()
        with pause(trainer):
            order, _, rest = self._lines.readline().decode().strip().partition(" ")
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
            self._monitor.ended = rest
            trainer.should_stop = True
        else:
            self._monitor.windows.in_passes = False


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
