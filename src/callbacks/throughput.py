"""ThroughputMonitor: what every training step costs, in which part, and how much it gets done."""

import time
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from .._lightning import overrides
from .._torch import any_mode, is_profiler_active
from ..distributed.gather import gather
from ..options.types import NonNegativeInt
from ..records.step_times import StepTimes
from ..records.terminal import block, is_verbose, say
from ._batches import samples_in, timesteps_in
from ._cost import cost_of, metrics_of, stalls_among
from ._never_raise import never_raise
from ._profiler_hook import ProfilerHook, attach_profiler_hook, detach_profiler_hook
from ._table import FIRST, INVALID, RECORDED, UpdateTable
from ._timer import (
    PARTS_OF_ACTIONS,
    PAUSE,
    PREPARING,
    REQUEST,
    VALIDATION,
    Clock,
    StepTimer,
    add_timer,
    clock_for,
    pause,
    remove_timer,
)
from ._windows import Windows
from ._writer import StepWriter

if TYPE_CHECKING:
    from ..records.operations import StepOperations
    from ._analysis import StepAnalysis

# Training on a batch: it begins after on_train_batch_start, where modes of other callbacks may begin.
_BATCH = "run_training_batch"
FLUSH_EVERY = 100  # batches read and written together


class ThroughputMonitor(Callback):
    """Times every training step and its parts, in any Lightning project, without touching the module.

    Logs `time/step_ms`, its parts and `throughput/…` at every optimizer step; docs/measuring.md has units and meanings.
    Validation and checkpoints are excluded from the step. With accumulated gradients a step is an
    update of several batches.

    The times are the device's own on CUDA, read from events that have passed: no synchronisation, no `.item()`.
    Elsewhere they are the host's. On MPS the step and the wait for data are true, and the other parts are the times at
    which the host submitted the work. Manual optimisation shows the parts that it calls by Lightning's names
    (`manual_backward`, `optimizer.step()`), and the rest as forward.

    After the fit `summary` has the run's cost, rates and bottleneck; the run's record has it as `throughput`. Where it has no
    bottleneck, FLOP/s or MFU, `summary["missing"]` says why. `operations` has those of a step, if they were recorded.

    Args:
        every_n_steps: write every n-th step to the loggers; all are measured. 0 writes none, with a warning.
        warmup_steps: left out of the summary. A fit that is no longer has no rate.
        batch_size_fn: the samples of a batch, for batches in which the length of the first tensor is another number.
        timesteps_fn: the time steps of a batch, all samples together. Without it a module whose `spec.kind` is
            `sequence` has `spec.input_shape[0]` time steps a sample.
        flops_per_sample: forward and backward, for modules whose steps cannot be recorded: compiled and sharded ones.
        calibrate: whether the device's peak may be measured (once, for some seconds; the result is cached). Without
            a measured peak there is no MFU.
        record_operations: whether the operations of the updates 2 to 4 are recorded: the FLOPs of a sample, and evidence
            for the bottleneck. These updates are slower, and no rate is read from them.
        verbose: whether the summary is printed when training ends; `train.py` prints it with the run's last lines.
        details: whether TensorBoard gets the parts of a step, FLOP/s and batches/s too. CSV has them in any case.
    """

    observes_only = True

    def __init__(
        self,
        every_n_steps: NonNegativeInt | None = 1,
        warmup_steps: NonNegativeInt = 5,
        batch_size_fn: Callable[[Any], int] | None = None,
        timesteps_fn: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        calibrate: bool = True,
        record_operations: bool = True,
        verbose: bool = True,
        details: bool = False,
    ):
        self.every_n_steps = 1 if every_n_steps is None else every_n_steps
        self.warmup_steps = warmup_steps
        self.batch_size_fn = batch_size_fn
        self.timesteps_fn = timesteps_fn
        self.flops_per_sample = flops_per_sample
        self.calibrate = calibrate
        self.record_operations = record_operations
        self.verbose = verbose
        self.details = details
        self.summary: dict[str, Any] = {}
        self.failure: str | None = None  # the exception that has ended the measurement
        self.operations: StepOperations | None = None
        self._active = False
        self._hook: ProfilerHook | None = None
        self._analysis: StepAnalysis | None = None  # of this fit
        self.timer, self.windows, self.table = StepTimer(Clock()), Windows(0), UpdateTable(warmup_steps)  # of this fit
        self.ended: str | None = None  # why a timed run has ended

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned: the arguments and the results, without what belongs to a fit."""
        known = (*signature(type(self).__init__).parameters, "summary", "operations", "failure")
        return {name: value for name, value in vars(self).items() if name in known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse of `__getstate__`."""
        ThroughputMonitor.__init__(self)
        vars(self).update(state)

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the summary, as `throughput`."""
        return {"throughput": self.summary}

    def summary_lines(self) -> list[str]:
        """For the run's last lines: what ran, how fast, what limits it, and what to try."""
        from ._run_words import headline

        return headline(self.summary) if self.verbose else []

    def detail_lines(self) -> list[str]:
        """For the details of a run: every number, and the evidence."""
        from ._run_words import details

        return details(self.summary) if self.verbose else []

    def step_times(self) -> StepTimes | None:
        """After the fit: the time of each measured step, to be kept with `write_step_times`; None without a summary."""
        return self.table.times() if "updates" in self.summary else None

    @property
    def is_measuring(self) -> bool:
        """Whether the steps of a fit are being measured."""
        return self._active

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._analysis = None  # of an earlier fit
            from ._analysis import StepAnalysis

            self.summary, self.failure = _nothing("no batch was trained"), None
            if self.every_n_steps == 0:
                rank_zero_warn("ThroughputMonitor(every_n_steps=0) writes no step to the loggers, only the summary")
            options = (self.record_operations, self.flops_per_sample, self.calibrate)
            self._analysis = StepAnalysis(trainer, pl_module, *options)

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device, analysis = trainer.strategy.root_device, self._analysis
        if analysis is None:  # it could not begin
            return
        self.summary, self.operations, self.ended = {}, None, None
        self.timer = StepTimer(clock_for(device), trainer.global_step)
        analysis.begin(trainer, pl_module, lambda: self.timer.part)
        self._recorded = analysis.recorded
        self._first_counted = max(1, self.warmup_steps, self._recorded.last)
        self.windows = Windows(self._first_counted)
        self.table = UpdateTable(self.warmup_steps, self.windows, trainer.global_step)
        self._writer = StepWriter(trainer, self.details)
        self._validating, self._windows_read = False, 0
        detach_profiler_hook(trainer, self._hook)
        unused = {hook for hook in PREPARING if not overrides(trainer, hook)}
        endings = frozenset((*PARTS_OF_ACTIONS, _BATCH)) - unused
        self._hook = attach_profiler_hook(trainer, endings, self._on_action_start, self._on_action_end)
        self._active = True
        add_timer(trainer, self.timer)
        self._started = time.perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)
        # A rank that has stopped measuring gives None; the others wait for it.
        steps = gather(self.summary.get("step_ms"), trainer.world_size) if trainer.world_size > 1 else []
        self._sum_up(trainer, steps)
        self._conclude(trainer, steps)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Other ranks may be gone: nothing is gathered from them, and the device may wait for them for ever.
        self._stop(trainer, wait=False)
        self.summary |= _nothing(f"the fit ended with {type(exception).__name__}")

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        detach_profiler_hook(trainer, self._hook)
        self.disable()

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._active = False
        if self._analysis is not None:
            self._analysis.recorded.stop()

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

    @never_raise
    def _on_action_start(self, action: str) -> None:
        if not self._active:
            return
        if action == _BATCH:
            self._record()
            return
        if action == REQUEST:
            self._recorded.stop()
            self._begin_batch()
        elif PARTS_OF_ACTIONS[action] == PAUSE:
            self._recorded.stop()
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

    def _record(self) -> None:
        """Record the operations of a batch whose update is among those to be recorded."""
        batch = self.timer.current
        samples = batch.samples if batch is not None else 0
        self._recorded.start(self.timer.updates + 1, self.timer.global_step, samples)
        if batch is not None:  # an OperationProfiler or the user may record it, too
            batch.recorded = self._recorded.active or any_mode() or is_profiler_active()

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        timed = self.timer.current if self._active else None
        if timed is not None:
            timed.samples = (self.batch_size_fn or samples_in)(batch)
            timed.timesteps = self.timesteps_fn(batch) if self.timesteps_fn else timesteps_in(pl_module, timed.samples)

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
            self._recorded.stop()
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
            self._recorded.stop()
            self.timer.end_step()

    def _flush(self, trainer: Trainer, wait: bool) -> None:
        """Turn marks into rows of the table, as far as they can be read without waiting, and write them."""
        with pause(trainer, part_of_fit=True):
            assert self._analysis is not None
            self._analysis.learn(trainer)
            self._windows_read = len(self.windows.all)
            rows = self._read(wait)
            if self.every_n_steps:
                rows = rows[
                    ((rows["flags"] & (FIRST | RECORDED | INVALID)) == 0) & (rows["step"] % self.every_n_steps == 0)
                ]
                if len(rows):
                    flops = self._analysis.flops
                    scalars = metrics_of(rows, trainer.world_size, flops.per_sample, flops.peak)
                    recent = self.table.step_ms(slice(-FLUSH_EVERY, None))  # rows of a window may be one or two
                    self._writer.write(scalars, always=stalls_among(rows, float(numpy.median(recent))))

    def _read(self, wait: bool) -> Any:
        """The rows of batches whose marks have passed on the device, or of all."""
        clock, finished, batches = self.timer.clock, self.timer.finished, []
        if wait and finished:
            clock.wait(finished[-1].end)
        while finished and clock.ready(finished[0].end):
            batches.append(finished.popleft())
        rows = self.table.add([batch for batch in batches if batch.trained], clock)
        for batch in batches:
            clock.reuse(batch.moments[:-1])  # the last moment is the next batch's first
        return rows

    @never_raise
    def _stop(self, trainer: Trainer, wait: bool = True) -> None:
        remove_timer(trainer, self.timer)
        detach_profiler_hook(trainer, self._hook)
        if self._active:
            self._recorded.stop()
            self.timer.end_step()
            self.windows.end(self.timer.updates)
            if wait and self._analysis is not None:  # else in the middle of an update, which may be a recorded one
                self._analysis.learn(trainer, is_over=True)
            self._flush(trainer, wait)
            self._active = False
            seconds = time.perf_counter() - self._started - self.timer.paused_s
            if cost := cost_of(self.table, trainer.world_size, seconds):
                self.summary = cost | self.windows.facts() | ({"ended": self.ended} if self.ended else {})

    @never_raise
    def _sum_up(self, trainer: Trainer, steps: list[float | None]) -> None:
        """Complete this rank's summary, given the mean step of every rank."""
        cost = self.summary
        measured = [step for step in steps if step is not None]
        if 0 < len(measured) < len(steps):
            self.summary = {}
            rank_zero_warn(f"ThroughputMonitor has no summary: {_stopped(steps)}")
        elif cost and self._analysis is not None:
            self.summary = self._analysis.summary(trainer, cost, self.table, self.timer.spans.all(), measured)
            self.operations = self._analysis.operations

    @never_raise
    def _conclude(self, trainer: Trainer, steps: list[float | None]) -> None:
        """Say why there is no summary, where there is none, and print it."""
        if not self.summary:
            why = self.failure and f"the measurement ended with {self.failure}"
            why = why or (_stopped(steps) if None in steps else self._why_nothing_is_known())
            self.summary = _nothing(why)
        elif "title" not in self.summary:  # the times are known, and the analysis has failed
            self.summary |= _nothing(f"the measurement ended with {self.failure}")
        from ._setting import own_config

        if trainer.is_global_zero and own_config(trainer.lightning_module) is None:
            lines = [*self.summary_lines(), *(self.detail_lines() if is_verbose() else [])]
            if lines:
                say(f"\n{block(lines)}")

    def _why_nothing_is_known(self) -> str:
        if not self.timer.batches:
            return "no batch was trained"
        if not self.timer.updates:
            return (
                f"of {self.timer.batches:,} batches none ended with an optimizer step that Lightning counts; with manual "
                "optimization, step the optimizers that self.optimizers() returns"
            )
        if self.timer.updates <= self._first_counted:
            return f"of {self.timer.updates} updates none came after the warm-up of {self._first_counted}"
        return "no step has a time: the clock has jumped"


def _nothing(why: str) -> dict[str, Any]:
    """A summary that only says why there is no verdict."""
    return {"missing": {"bottleneck": why}}


def _stopped(steps: list[float | None]) -> str:
    return f"rank {steps.index(None)} has stopped measuring"
