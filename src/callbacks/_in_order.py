"""Rows in the order of their steps, for loggers that take no other: `wandb.log(step=…)` drops a row that goes back.

Callbacks write what the device has passed, up to a hundred steps at once. Lightning writes at once, and counts from 0
where `global_step` counts from 1. So between `join` and `leave` of the callbacks that write, a logger's `log_metrics`
holds the rows of a step back until no more of it, and none before it, can come, and writes them as one. The CSV file
and TensorBoard take steps in any order, and get them as they come.
"""

import heapq
import math
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from lightning import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from .._lightning import logged_step
from ._timer import pause
from ._writer import attempt, forget_failures, is_plain
from .step_file import StepFile
from .tensorboard import TensorBoard

_MOST = 10_000  # steps held back; more wait only where a module steps several optimizers, or accumulates by hand


class Source(Protocol):
    """A callback that writes its rows some steps late, and in the order of their steps."""

    def oldest_step(self) -> float:
        """The lowest step of which it may still write a row; infinity if it writes no more in this fit."""


class _Held:
    """The rows of one logger that are held back; called in place of the logger's `log_metrics`."""

    def __init__(self, logger: Logger, order: "_Order"):
        self.logger, self._order, self._log = logger, order, logger.log_metrics
        self._rows: dict[int, dict[str, Any]] = {}
        self._steps: list[int] = []  # of these rows, a heap
        cast(Any, logger).log_metrics = self

    def __call__(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if step is None:  # the logger counts by itself
            self._log(metrics, step=None)
            return
        if step not in self._rows:
            self._rows[step] = {}
            heapq.heappush(self._steps, step)
        self._rows[step].update(metrics)
        # While a source writes many rows, in the order of their steps, `oldest_step` counts them all as written.
        self.write(min(step, self._order.complete()) if len(self._rows) <= _MOST else math.inf)

    def write(self, below: float) -> None:
        """Write the rows of the steps below this one."""
        while self._steps and self._steps[0] < below:
            step = heapq.heappop(self._steps)
            self._log(self._rows.pop(step), step=step)

    def restore(self) -> None:
        """Give the logger its own `log_metrics` back."""
        vars(self.logger).pop("log_metrics", None)


class _Order:
    """The order of one fit: who writes, and what is held back."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._is_ending = False
        self.sources: list[Source] = []
        taking_any = (StepFile, TensorBoard, TensorBoardLogger)
        ordered = [one for one in trainer.loggers if not any(is_plain(one, kind) for kind in taking_any)]
        self._held = [_Held(logger, self) for logger in ordered]

    def complete(self) -> float:
        """The steps below this one are complete: neither a source nor Lightning writes an earlier row any more.

        Lightning logs at the step that it counts; at an epoch's end, when it has counted on, at the one before.
        """
        own = min((source.oldest_step() for source in self.sources), default=math.inf)
        return own if self._is_ending else min(own, logged_step(self._trainer) - 1)

    def remove(self, source: Source) -> bool:
        """Write what is complete without a source, whose fit is over. Returns whether it was the last one."""
        self.sources.remove(source)
        self._is_ending = True
        below = self.complete()
        with pause(self._trainer):
            for held in self._held:
                attempt(self._trainer, held.logger, partial(held.write, below))
                if below == math.inf:
                    held.restore()
        return below == math.inf


_orders: WeakKeyDictionary[Trainer, _Order] = WeakKeyDictionary()


def join(trainer: Trainer, source: Source) -> None:
    """Have the loggers of a trainer get their rows in order, those of this source among them, until `leave`."""
    if trainer.is_global_zero:
        if trainer not in _orders:
            _orders[trainer] = _Order(trainer)
        _orders[trainer].sources.append(source)


def leave(trainer: Trainer, source: Source) -> None:
    """Undo `join`, if it was called, when the source has written its last row of the fit."""
    order = _orders.get(trainer)
    if order is not None and source in order.sources and order.remove(source):
        del _orders[trainer]
        forget_failures(trainer)
