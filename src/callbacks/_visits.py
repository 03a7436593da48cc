"""Visits: a run of a sweep trains only while the sweep visits it, and waits between two updates for the next visit.

The run reports that it is ready before its first batch. Then the sweep sends orders: `warm up`, `go <pass> <seconds>`
for a visit, `stop <reason>`, or `train` to the end. The run answers a visit with the facts of its window. After any other
order, or if the sweep has ended, the run no longer waits: a signal that ends it is on its way (sweep/job.py).

While a run waits, the workers of its loaders are suspended. Otherwise each visit would begin with full buffers, and a training
that is limited by its loader would seem faster than it is.
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

from .._lightning import callback_of, callbacks_of, exclude_wait, logged_step
from ..hardware.device_memory import shared_memory
from ._timer import HostClock, clock_for, pause
from ._updates import Updates
from .device import DeviceMonitor
from .tensorboard import TensorBoard
from .throughput import ThroughputMonitor
from .wait_until_quiet import WaitUntilQuiet

_WARM = 3  # updates from whose time the length of the fit is estimated
SHORT_S = 0.1  # with shorter steps a visit leaves its first step out: the caches hold the data of other runs
# If more than this share of the steps is waiting for data, a visit consists of whole bursts of a batch from each worker, since
# batches that workers begin together are ready together. Such a visit ends after `LONG_S` seconds, or after one longer step.
WAITS, LONG_S = 0.1, 3.0


class Visitor(Protocol):
    """The sweep's side of a visited run."""

    def hear(self) -> str:
        """Wait for the next order, and return it."""
        ...

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Send facts to the sweep. Raises OSError if the sweep has ended."""
        ...


class Visits(Callback):
    """Lets a run train only while it is visited. It stands behind the configured callbacks, and before the one for signals.

    Args:
        monitor: measures the steps of each visit as a window.
        visitor: sends the orders.

    `waited_s` has the seconds that the run has waited so far.
    """

    def __init__(self, monitor: ThroughputMonitor, visitor: Visitor):
        self._monitor = monitor
        self._visitor = visitor
        self._clock = HostClock()
        self._course: Iterator[None] | None = None  # advances at each update; None before the first batch
        self._pending_marks = deque[Any]()  # the marks of updates that the device may not have passed
        self._warm_ends = deque[float](maxlen=_WARM)  # of the warm-up's last updates: recorded ones are slower
        self.waited_s = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._updates, self._clock = Updates(trainer.global_step), clock_for(trainer.strategy.root_device)
        if self._monitor.is_measuring:
            self._monitor.measure_by_clock(False)  # no window begins before the first visit

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._course is None and self._monitor.is_measuring:
            self._course = self._follow_orders(trainer)
            next(self._course, None)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_update = self._updates.end_batch(trainer.global_step)
        if is_update and self._course is not None and self._monitor.is_measuring:
            self._limit_lead()
            next(self._course, None)

    def _follow_orders(self, trainer: Trainer) -> Iterator[None]:
        """Follow the visitor's orders from the first batch on; each `yield` lasts until the end of the next update."""
        monitor, lags, mean_s, burst = self._monitor, self._clock.lags, 0.0, 1
        order = self._tell_and_wait(trainer, {"ready": True})
        if order == "warm up":
            while not monitor.is_warm or (lags and len(self._warm_ends) < _WARM):
                yield
                if monitor.is_warm or not lags:  # else these updates are slower only on the host
                    self._warm_ends.append(time.perf_counter())
            order = self._tell_and_wait(trainer, {"warm": True, "fit_s": self._remaining_fit_s(trainer)})
        while order.startswith("go "):
            _, number, seconds = order.split()
            if mean_s < SHORT_S:
                yield
            monitor.begin_window(int(number))
            began, elapsed_s, updates = time.perf_counter(), 0.0, 0
            while not updates or elapsed_s < float(seconds) or (updates % burst and elapsed_s < LONG_S):
                yield
                elapsed_s, updates = time.perf_counter() - began, updates + 1
            facts = monitor.end_window(trainer)
            mean_s = facts.get("mean_s", 0.0)
            burst = count_workers(trainer) if facts.get("wait_share", 0.0) > WAITS else 1
            order = self._tell_and_wait(trainer, facts)
        action, _, reason = order.partition(" ")
        if action == "stop":
            monitor.set_end_reason(reason)
            trainer.should_stop = True
        else:
            monitor.measure_by_clock(True)
            self._clock = HostClock()  # the host may be far ahead again

    def _limit_lead(self) -> None:
        """Keep the host at most two updates ahead of the device, so that a visit is no longer than ordered."""
        self._pending_marks.append(self._clock.mark())
        if len(self._pending_marks) > 2:
            oldest = self._pending_marks.popleft()
            self._clock.wait(oldest)
            self._clock.reuse([oldest])

    def _remaining_fit_s(self, trainer: Trainer) -> float | None:
        """Estimate the remaining seconds of the fit from its remaining updates and the Timers' limits; None if unknown."""
        updates_left = trainer.estimated_stepping_batches - logged_step(trainer)
        if trainer.max_steps >= 0:  # the limit counts the steps of each optimizer
            steps_per_update = max(1, self._updates.step - self._updates.before)
            updates_left = min(updates_left, (trainer.max_steps - trainer.global_step) / steps_per_update)
        limits_s = (callback.time_remaining() for callback in callbacks_of(trainer) if isinstance(callback, Timer))
        estimates_s = [seconds for seconds in limits_s if seconds is not None]
        if len(self._warm_ends) >= 2 and 0 <= updates_left < math.inf:
            estimates_s.append(updates_left * (self._warm_ends[-1] - self._warm_ends[0]) / (len(self._warm_ends) - 1))
        return min(estimates_s, default=None)

    def _tell_and_wait(self, trainer: Trainer, facts: Mapping[str, Any]) -> str:
        """Send facts with the device's memory, and wait for the next order; this time is excluded from steps and rates."""
        began = time.perf_counter()
        with pause(trainer), suspended_workers():
            if device := callback_of(trainer, DeviceMonitor):
                device.pause()
            with contextlib.suppress(OSError):  # the sweep has ended
                self._visitor.tell({**facts, "device": shared_memory(trainer.strategy.root_device)})
            order = self._visitor.hear()
        waited_s = time.perf_counter() - began
        exclude_wait(trainer, waited_s)
        self.waited_s += waited_s
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard):
                logger.waited_s = self.waited_s
        return order


@contextlib.contextmanager
def suspended_workers() -> Iterator[None]:
    """Suspend this process's children that `multiprocessing` has started, such as loader workers, and resume them at the end."""
    suspended: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):  # the child has ended
            worker = psutil.Process(child.pid)
            worker.suspend()
            suspended.append(worker)
    try:
        yield
    finally:
        for worker in suspended:
            with contextlib.suppress(psutil.Error):
                worker.resume()


def count_workers(trainer: Trainer) -> int:
    """Return how many processes load the batches of the training; at least 1."""
    loaders = tree_leaves(trainer.train_dataloader)
    return max([1, *(getattr(loader, "num_workers", 0) for loader in loaders)])


def waiting_seconds(callbacks: Iterable[Any]) -> float:
    """Return the seconds that a run has waited for its visits and for a quiet machine."""
    return sum(callback.waited_s for callback in callbacks if isinstance(callback, Visits | WaitUntilQuiet))


def non_training_seconds(callbacks: Sequence[Any]) -> float:
    """Return the seconds of a run that are not training: its waits, and the calibration of the device."""
    monitors = (callback for callback in callbacks if isinstance(callback, ThroughputMonitor))
    return waiting_seconds(callbacks) + sum(monitor.calibration_s for monitor in monitors)


def make_visits(callbacks: Iterable[Callback], visitor: Visitor | None) -> list[Callback]:
    """Return the Visits callback for a visitor; an empty list without a visitor or a ThroughputMonitor."""
    monitors = [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
    return [Visits(monitors[0], visitor)] if visitor is not None and monitors else []
