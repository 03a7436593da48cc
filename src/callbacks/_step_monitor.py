"""StepMonitor: a callback that times the parts of every step, and records the operations of a few.

One batch, as Lightning's loop announces it:

    train_dataloader_next → on_train_batch_start → run_training_batch (training_step, backward, optimizer_step) → …_end

The profiler hook hears the actions, and marks the parts on a StepTimer. Finished batches become rows of an UpdateTable
some time later, when their marks can be read without waiting for the device.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from .._lightning import overrides
from .._torch import any_mode, is_profiler_active
from ..hardware.devices import cache_bytes
from ._batches import samples_in, timesteps_in
from ._never_raise import never_raise
from ._profiler_hook import ProfilerHook, attach_profiler_hook, detach_profiler_hook
from ._table import UpdateTable
from ._timer import (
    PARTS_OF_ACTIONS,
    PAUSE,
    PREPARING,
    REQUEST,
    VALIDATION,
    HostClock,
    StepTimer,
    add_timer,
    clock_for,
    pause,
    remove_timer,
)
from ._windows import Windows

if TYPE_CHECKING:
    from ._recording import RecordedUpdates

# Training on a batch: it begins after on_train_batch_start, where modes of other callbacks may begin.
_BATCH = "run_training_batch"
FLUSH_EVERY = 100  # batches read together


class StepMonitor(Callback):
    """Times every step and its parts, in any Lightning project, without touching the module.

    A subclass calls `_begin_fit` when training starts and `_end_fit` when it ends, and may take the rows in `_take`.

    Args:
        warmup_steps: updates that are not counted.

    Attributes:
        timer, windows, table, recorded: of this fit, or of the last one; `recorded` is None before the first.
        failure: the exception that has ended the measurement.
    """

    observes_only = True
    batch_size_fn: Callable[[Any], int] | None = None
    timesteps_fn: Callable[[Any], int] | None = None

    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self.failure: str | None = None
        self.timer, self.windows = StepTimer(HostClock()), Windows(0)
        self.recorded: RecordedUpdates | None = None  # its module, which not every fit needs, is not imported yet
        self.table = UpdateTable(warmup_steps, self.windows)
        self._active = False
        self._hook: ProfilerHook | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether the steps of a fit are being measured."""
        return self._active

    def _begin_fit(self, trainer: Trainer, module: LightningModule, recorded: "RecordedUpdates") -> None:
        """Begin to measure the steps of a fit, of which some updates are recorded."""
        device = trainer.strategy.root_device
        self.timer, self.recorded = StepTimer(clock_for(device), trainer.global_step), recorded
        recorded.attach(trainer, module, cache_bytes(device), lambda: self.timer.part)
        self._first_counted = max(1, self.warmup_steps)
        if recorded.first <= self._first_counted + 1:
            self._first_counted = max(self._first_counted, recorded.last)
        self.windows = Windows(self._first_counted)
        self.table = UpdateTable(self.warmup_steps, self.windows, trainer.global_step)
        self._validating, self._windows_read = False, 0
        detach_profiler_hook(trainer, self._hook)
        unused = {hook for hook in PREPARING if not overrides(trainer, hook)}
        actions = frozenset((*PARTS_OF_ACTIONS, _BATCH)) - unused
        self._hook = attach_profiler_hook(trainer, actions, self._on_action_start, self._on_action_end)
        self._active = True
        add_timer(trainer, self.timer)
        self._started = time.perf_counter()

    def _end_fit(self, trainer: Trainer, wait: bool = True) -> float:
        """Measure no more, and read what is left; with `wait` after waiting for the device. Returns the fit's seconds.

        Without `wait` the fit may have ended in the middle of an update.
        """
        remove_timer(trainer, self.timer)
        detach_profiler_hook(trainer, self._hook)
        self._stop_recording()
        self.timer.end_step()
        self.windows.end(self.timer.updates)
        self._flush(trainer, wait, is_over=wait)
        self._active = False
        return time.perf_counter() - self._started - self.timer.paused_s

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._active = False
        self._stop_recording()

    def begin_window(self, pass_: int) -> None:
        """Between two updates, begin a window that lasts until `end_window`; from now on none begins by the clock."""
        self.timer.end_step()
        self.windows.in_passes = True
        self.windows.begin(self.timer.updates, pass_)

    def end_window(self, trainer: Trainer) -> dict[str, Any]:
        """After an update, end the window and read its steps, which waits for the device; returns what it has measured."""
        self.timer.end_step()
        self.windows.end(self.timer.updates)
        self._flush(trainer, wait=True)
        return self.table.window_facts(self.windows.last) if self.windows.last else {}

    def _take(self, trainer: Trainer, rows: NDArray[Any], is_over: bool) -> None:
        """Rows that are new in the table; `is_over` of the last ones of a fit. A subclass may write them."""

    @never_raise
    def _on_action_start(self, action: str) -> None:
        if not self._active:
            return
        if action == _BATCH:
            self._record()
            return
        if action == REQUEST:
            self._stop_recording()
            self._begin_batch()
        elif PARTS_OF_ACTIONS[action] == PAUSE:
            self._stop_recording()
        if action == VALIDATION:
            self._validating = True
        self.timer.enter(PARTS_OF_ACTIONS[action])

    @never_raise
    def _on_action_end(self, action: str) -> None:
        if self._active and action not in (_BATCH, VALIDATION):
            self.timer.leave(PARTS_OF_ACTIONS[action])

    def _begin_batch(self) -> None:
        """Begin a batch, and a window where it is time: what a window's border costs is in no step."""
        updates = self.timer.updates
        if updates <= self._first_counted:
            self.timer.spans.clear()
        if self.timer.is_between_updates and self.windows.is_due(updates):
            with self.timer.pause(part_of_fit=True):
                self.windows.begin(updates)
        self.timer.begin_batch()

    def _stop_recording(self) -> None:
        if self.recorded is not None:
            self.recorded.stop()

    def _record(self) -> None:
        """Record the operations of a batch whose update is among those to be recorded."""
        batch = self.timer.current
        samples = batch.samples if batch is not None else 0
        assert self.recorded is not None
        self.recorded.start(self.timer.updates + 1, self.timer.global_step, samples)
        if batch is not None:  # another callback or the user may record it, too
            batch.recorded = self.recorded.active or any_mode() or is_profiler_active()

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        timed = self.timer.current if self._active else None
        if timed is not None:
            timed.samples = (self.batch_size_fn or samples_in)(batch)
            if self.timesteps_fn is not None:
                timed.timesteps = self.timesteps_fn(batch)
            else:
                counted = getattr(trainer.train_dataloader, "timesteps", None)  # by our loader, without padding
                timed.timesteps = counted if isinstance(counted, int) else timesteps_in(pl_module, timed.samples)

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._active:  # automatic and manual optimisation both call this hook
            self.timer.enter("backward")

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            self.timer.leave("backward")

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._active:
            self.timer.end_batch(trainer.global_step)
            if len(self.timer.finished) >= FLUSH_EVERY or len(self.windows.all) > self._windows_read:
                self._flush(trainer, wait=False)

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active and not self._validating:
            self._validating = True
            self._stop_recording()
            self.timer.enter(PAUSE)

    @override
    @never_raise
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active and self._validating:
            self._validating = False
            self.timer.leave(PAUSE)

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # The step before a checkpoint ends here, so that the curves reach as far as the checkpoint.
        if self._active and self.timer.current is not None and self.timer.current.trained:
            self.timer.end_step()
            self._flush(trainer, wait=True)

    @override
    @never_raise
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:  # the time between two epochs is in no step
            self._stop_recording()
            self.timer.end_step()

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        detach_profiler_hook(trainer, self._hook)
        remove_timer(trainer, self.timer)
        self.disable()

    def _flush(self, trainer: Trainer, wait: bool, is_over: bool = False) -> None:
        """Turn marks into rows of the table, as far as they can be read without waiting."""
        with pause(trainer, part_of_fit=True):
            self._windows_read = len(self.windows.all)
            clock, finished, batches = self.timer.clock, self.timer.finished, []
            if wait and finished:
                clock.wait(finished[-1].end)
            while finished and clock.ready(finished[0].end):
                batches.append(finished.popleft())
            rows = self.table.add([batch for batch in batches if batch.trained], clock)
            for batch in batches:
                clock.reuse(batch.moments[:-1])  # the last moment is the next batch's first
            self._take(trainer, rows, is_over)
