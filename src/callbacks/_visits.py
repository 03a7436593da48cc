"""Visits: a run of a sweep trains only while the sweep visits it, and waits between two updates for the next visit.

The run says that it is ready before its first batch. Then the sweep says what it may do: `warm up`, `go <pass> <seconds>`
for a visit, `stop <reason>`, or `train` to the end. The run answers a visit with what it has measured. Where the sweep says
anything else, or has ended, the run waits no more: a signal that ends it is on its way (sweep/job.py).
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from .._lightning import callback_of, logged_step
from ..hardware.device_memory import shared_memory
from ._timer import HostClock, clock_for, pause
from ._updates import Updates
from .device import DeviceMonitor
from .tensorboard import TensorBoard
from .throughput import ThroughputMonitor
from .wait_until_quiet import WaitUntilQuiet

_WARM = 3  # updates by which the length of a training is told
SHORT_S = 0.1  # the first one of such steps is left out: what others trained meanwhile is in the caches


class Visitor(Protocol):
    """Whoever visits a run."""

    def hear(self) -> str:
        """Wait for what the run may do."""
        ...

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Answer. Raises OSError if nobody listens any more."""
        ...


class Visits(Callback):
    """Trains while it is visited. It stands behind the ThroughputMonitor that measures, and before what ends the run.

    Args:
        monitor: that measures the steps of each visit as a window.
        visitor: says when to train.

    `waited_s` are the seconds in which the run has waited.
    """

    def __init__(self, monitor: ThroughputMonitor, visitor: Visitor):
        self._monitor = monitor
        self._visitor = visitor
        self._is_ready = self._is_warm = self._left = False
        self._is_short = True
        self._clock = HostClock()
        self._ahead = deque[Any]()  # the marks of updates that the device may not have reached
        self._warm_up = deque[float](maxlen=_WARM)  # when its last updates ended: those before are recorded, and slower
        self._visit: tuple[int, float] | None = None  # whose window has not begun yet
        self.waited_s = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._updates, self._clock = Updates(trainer.global_step), clock_for(trainer.strategy.root_device)
        if self._monitor.is_measuring:
            self._monitor.measure_by_clock(False)  # no window begins before the first visit

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._is_ready and self._monitor.is_measuring:
            self._is_ready = True
            self._tell_and_wait(trainer, {"ready": True})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        monitor = self._monitor
        if not self._updates.end_batch(trainer.global_step) or self._left or not monitor.is_measuring:
            return
        self._stay_near()
        if not self._is_warm:
            lags = self._clock.lags  # the updates of its warm-up are slower for the host alone, and are not its own
            if monitor.is_warm or not lags:
                self._warm_up.append(time.perf_counter())
            if monitor.is_warm and (len(self._warm_up) == _WARM or not lags):
                self._is_warm = True
                self._tell_and_wait(trainer, {"warm": True, "fit_s": self._fit_s(trainer)})
        elif self._visit:
            self._begin(*self._visit)
        elif time.perf_counter() >= self._until:
            facts = monitor.end_window(trainer)
            self._is_short = facts.get("mean_s", 0.0) < SHORT_S
            self._tell_and_wait(trainer, facts)

    def _stay_near(self) -> None:
        """Let the host be two updates ahead of the device at most, so that a visit is no longer than it was asked for."""
        self._ahead.append(self._clock.mark())
        if len(self._ahead) > 2:
            first = self._ahead.popleft()
            self._clock.wait(first)
            self._clock.reuse([first])

    def _fit_s(self, trainer: Trainer) -> float | None:
        """About how long the updates take that are left; None where nobody knows how many they are."""
        left = trainer.estimated_stepping_batches - logged_step(trainer)
        if trainer.max_steps >= 0:  # which counts the steps of each optimizer
            steps = max(1, self._updates.step - self._updates.before)
            left = min(left, (trainer.max_steps - trainer.global_step) / steps)
        if len(self._warm_up) < 2 or not 0 <= left < math.inf:
            return None
        return left * (self._warm_up[-1] - self._warm_up[0]) / (len(self._warm_up) - 1)

    def _begin(self, number: int, seconds: float) -> None:
        """Begin the window of a visit."""
        self._visit = None
        self._monitor.begin_window(number)
        self._until = time.perf_counter() + seconds

    def _tell_and_wait(self, trainer: Trainer, facts: Mapping[str, Any]) -> None:
        """Answer, with the memory of the device, and wait for the next visit; the time is in no step and no rate."""
        began = time.perf_counter()
        with pause(trainer):
            if device := callback_of(trainer, DeviceMonitor):
                device.pause()
            with contextlib.suppress(OSError):  # the sweep has ended, and nobody answers
                self._visitor.tell({**facts, "device": shared_memory(trainer.strategy.root_device)})
            order, _, rest = self._visitor.hear().partition(" ")
        self.waited_s += time.perf_counter() - began
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard):
                logger.waited_s = self.waited_s
        if order == "go":
            number, seconds = rest.split()
            self._visit = int(number), float(seconds)
            if not self._is_short:  # else it begins after the next update
                self._begin(*self._visit)
        elif order == "stop":
            self._monitor.end(rest)
            self._left = trainer.should_stop = True
        elif order != "warm":
            self._left = True
            self._monitor.measure_by_clock(True)


def seconds_waited(callbacks: Iterable[Any]) -> float:
    """How long a run has waited: for its visits, and for a quiet machine."""
    return sum(callback.waited_s for callback in callbacks if isinstance(callback, Visits | WaitUntilQuiet))


def visits_of(callbacks: Iterable[Callback], visitor: Visitor | None) -> list[Callback]:
    """What makes a run wait for a visitor, where there is one and a monitor measures."""
    monitors = [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
    return [Visits(monitors[0], visitor)] if visitor is not None and monitors else []
