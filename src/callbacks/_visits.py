"""Visits: a run of a sweep trains only while the sweep visits it, and waits between two updates for the next visit.

The run says that it is ready before its first batch. Then the sweep says what it may do: `warm up`, `go <pass> <seconds>`
for a visit, `stop <reason>`, or `train` to the end. The run answers a visit with what it has measured. Where the sweep says
anything else, or has ended, the run waits no more: a signal that ends it is on its way (sweep/job.py).

While a run waits, the workers of its loaders are stopped. Otherwise each visit would begin with full buffers, and a training that
its loader limits would seem to be faster than it is.
"""

import contextlib
import math
import multiprocessing
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import psutil
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Timer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from .._lightning import callback_of, callbacks_of, leave_out_wait, logged_step
from ..hardware.device_memory import shared_memory
from ._timer import HostClock, clock_for, pause
from ._updates import Updates
from .device import DeviceMonitor
from .tensorboard import TensorBoard
from .throughput import ThroughputMonitor
from .wait_until_quiet import WaitUntilQuiet

_WARM = 3  # updates by which the length of a training is told
SHORT_S = 0.1  # the first one of such steps is left out: what others trained meanwhile is in the caches
# Of the time of steps, for data. Then a visit has whole bursts, a batch of each worker: those that began together are ready
# together. It is no longer than a few seconds, where one step is not.
WAITS, LONG_S = 0.1, 3.0


class Visitor(Protocol):
    """Whoever visits a run."""

    def hear(self) -> str:
        """Wait for what the run may do."""
        ...

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Answer. Raises OSError if nobody listens any more."""
        ...


class Visits(Callback):
    """Trains while it is visited. It stands behind the configuration's callbacks, and before what ends a run at a signal.

    Args:
        monitor: that measures the steps of each visit as a window.
        visitor: says when to train.

    `waited_s` are the seconds in which the run has waited.
    """

    def __init__(self, monitor: ThroughputMonitor, visitor: Visitor):
        self._monitor = monitor
        self._visitor = visitor
        self._clock = HostClock()
        self._course: Iterator[None] | None = None  # None before the first batch
        self._ahead = deque[Any]()  # the marks of updates that the device may not have reached
        self._warm_up = deque[float](maxlen=_WARM)  # when its last updates ended: those before are recorded, and slower
        self.waited_s = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._updates, self._clock = Updates(trainer.global_step), clock_for(trainer.strategy.root_device)
        if self._monitor.is_measuring:
            self._monitor.measure_by_clock(False)  # no window begins before the first visit

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._course is None and self._monitor.is_measuring:
            self._course = self._visited(trainer)
            next(self._course, None)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_update = self._updates.end_batch(trainer.global_step)
        if is_update and self._course is not None and self._monitor.is_measuring:
            self._stay_near()
            next(self._course, None)

    def _visited(self, trainer: Trainer) -> Iterator[None]:
        """The course of a run from its first batch on; each `yield` is until the end of the next update."""
        monitor, lags, mean_s, burst = self._monitor, self._clock.lags, 0.0, 1
        order = self._tell_and_wait(trainer, {"ready": True})
        if order == "warm up":
            while not monitor.is_warm or (lags and len(self._warm_up) < _WARM):
                yield
                if monitor.is_warm or not lags:  # on such a device those before are slower for the host alone
                    self._warm_up.append(time.perf_counter())
            order = self._tell_and_wait(trainer, {"warm": True, "fit_s": self._fit_s(trainer)})
        while order.startswith("go "):
            _, number, seconds = order.split()
            if mean_s < SHORT_S:
                yield
            monitor.begin_window(int(number))
            began, taken, updates = time.perf_counter(), 0.0, 0
            while not updates or taken < float(seconds) or (updates % burst and taken < LONG_S):
                yield
                taken, updates = time.perf_counter() - began, updates + 1
            facts = monitor.end_window(trainer)
            mean_s = facts.get("mean_s", 0.0)
            burst = workers_of(trainer) if facts.get("wait_share", 0.0) > WAITS else 1
            order = self._tell_and_wait(trainer, facts)
        action, _, reason = order.partition(" ")
        if action == "stop":
            monitor.end(reason)
            trainer.should_stop = True
        else:
            monitor.measure_by_clock(True)
            self._clock = HostClock()  # the host may be far ahead again

    def _stay_near(self) -> None:
        """Let the host be two updates ahead of the device at most, so that a visit is no longer than it was asked for."""
        self._ahead.append(self._clock.mark())
        if len(self._ahead) > 2:
            first = self._ahead.popleft()
            self._clock.wait(first)
            self._clock.reuse([first])

    def _fit_s(self, trainer: Trainer) -> float | None:
        """About how long the fit goes on: the time of the updates that are left, or that a Timer leaves; None where nobody knows."""
        left = trainer.estimated_stepping_batches - logged_step(trainer)
        if trainer.max_steps >= 0:  # which counts the steps of each optimizer
            steps = max(1, self._updates.step - self._updates.before)
            left = min(left, (trainer.max_steps - trainer.global_step) / steps)
        timers = (each.time_remaining() for each in callbacks_of(trainer) if isinstance(each, Timer))
        known = [seconds for seconds in timers if seconds is not None]
        if len(self._warm_up) >= 2 and 0 <= left < math.inf:
            known.append(left * (self._warm_up[-1] - self._warm_up[0]) / (len(self._warm_up) - 1))
        return min(known, default=None)

    def _tell_and_wait(self, trainer: Trainer, facts: Mapping[str, Any]) -> str:
        """Answer, with the memory of the device, and wait for what the run may do; the time is in no step and no rate."""
        began = time.perf_counter()
        with pause(trainer), workers_stopped():
            if device := callback_of(trainer, DeviceMonitor):
                device.pause()
            with contextlib.suppress(OSError):  # the sweep has ended, and nobody answers
                self._visitor.tell({**facts, "device": shared_memory(trainer.strategy.root_device)})
            order = self._visitor.hear()
        waited_s = time.perf_counter() - began
        leave_out_wait(trainer, waited_s)
        self.waited_s += waited_s
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard):
                logger.waited_s = self.waited_s
        return order


@contextlib.contextmanager
def workers_stopped() -> Iterator[None]:
    """Stop the processes that Python has started for this one, as loaders do, and have them go on afterwards."""
    stopped: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):  # it has ended
            worker = psutil.Process(child.pid)
            worker.suspend()
            stopped.append(worker)
    try:
        yield
    finally:
        for worker in stopped:
            with contextlib.suppress(psutil.Error):
                worker.resume()


def workers_of(trainer: Trainer) -> int:
    """How many processes load the batches of the training, 1 at least."""
    loaders = tree_leaves(trainer.train_dataloader)
    return max([1, *(getattr(loader, "num_workers", 0) for loader in loaders)])


def seconds_waited(callbacks: Iterable[Any]) -> float:
    """How long a run has waited: for its visits, and for a quiet machine."""
    return sum(callback.waited_s for callback in callbacks if isinstance(callback, Visits | WaitUntilQuiet))


def seconds_beside(callbacks: Sequence[Any]) -> float:
    """How much of the time of a fit is no training: what it has waited, and what finding the peak of the device has taken."""
    monitors = (callback for callback in callbacks if isinstance(callback, ThroughputMonitor))
    return seconds_waited(callbacks) + sum(monitor.calibration_s for monitor in monitors)


def visits_of(callbacks: Iterable[Callback], visitor: Visitor | None) -> list[Callback]:
    """What makes a run wait for a visitor, where there is one and a monitor measures."""
    monitors = [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
    return [Visits(monitors[0], visitor)] if visitor is not None and monitors else []
