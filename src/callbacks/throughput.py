"""ThroughputMonitor: what every training step costs, in which part, and how much it gets done.

One batch, as Lightning's loop announces it:

    train_dataloader_next → on_train_batch_start → run_training_batch (training_step, backward, optimizer_step) → …_end

A profiler hook hears the actions, and marks the parts on a StepTimer. Finished batches become rows of an UpdateTable some
time later, when their marks can be read without waiting for the device. Curves and the summary are views of the table.
"""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from .._lightning import overrides
from .._torch import any_mode, is_profiler_active
from ..distributed.gather import gather, replicas
from ..hardware.processor import root_of_run
from ..hardware.programs import ProgramWatch
from ..options.types import NonNegativeInt
from ..records.rates import LOAD_SAID
from ..records.step_times import StepTimes
from ..records.terminal import block, is_in_sweep, is_verbose, say
from ._batches import require_number, samples_in, timesteps_in
from ._cost import cost_of, metrics_of, stalls_among
from ._in_order import join, leave
from ._never_raise import never_raise
from ._profiler_hook import ProfilerHook
from ._table import FIRST, INVALID, RECORDED, UpdateTable
from ._timer import (
    PARTS_OF_ACTIONS,
    PAUSE,
    PREPARING,
    REQUEST,
    VALIDATION,
    Batch,
    HostClock,
    StepTimer,
    add_timer,
    clock_for,
    pause,
    remove_timer,
)
from ._updates import passes
from ._windows import Windows
from ._writer import StepWriter

if TYPE_CHECKING:
    from ..records.operations import StepOperations
    from ._analysis import StepAnalysis
    from ._communication import Exchanges
    from ._compilation import Compilation
    from ._recording import RecordedUpdates

# Training on a batch: it begins after on_train_batch_start, where modes of other callbacks may begin.
_BATCH = "run_training_batch"
FLUSH_EVERY = 100  # batches read together


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
    Under DDP the summary says how long a step waits for gradients. The time in which torch.compile compiles is in no step.

    Args:
        every_n_steps: write every n-th step to the loggers; all are measured. 0 writes none.
        warmup_steps: left out of the summary; with `record_operations` at least the first four are. A fit that is no longer has
            no rate.
        batch_size_fn: the samples of a batch, for batches in which the length of the first tensor is another number.
        timesteps_fn: the time steps of a batch, all samples together. Without it a loader with an attribute `timesteps` says
            it, and else a module whose `spec.kind` is `sequence` has `spec.input_shape[0]` time steps a sample.
        flops_per_sample: forward and backward, for modules whose steps cannot be recorded: compiled and sharded ones.
        calibrate: whether the device's peak may be measured (once, for some seconds; the result is cached). Without
            a measured peak there is no MFU.
        record_operations: whether the operations of the updates 2 to 4 are recorded: the FLOPs of a sample, and evidence
            for the bottleneck. These updates are slower, and no rate is read from them.
        verbose: whether the summary is printed when training ends; `train.py` prints it with the run's last lines.
        details: whether TensorBoard gets the parts of a step, FLOP/s and batches/s too. CSV has them in any case.

    Attributes:
        timer, windows, table, recorded, analysis: of this fit, or of the last one; the last two are None before the first.
        failure: the exception that has ended the measurement.
        ended: why a timed run has ended, as whoever ended it says.
        kernel_s: seconds of a step in which a kernel ran, as whoever traced some steps says.
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
        for name, function in (("batch_size_fn", batch_size_fn), ("timesteps_fn", timesteps_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}: got {function!r}, takes {{_target_: …, _partial_: true}} of a function")
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
        self.operations: StepOperations | None = None
        self.timer, self.windows = StepTimer(HostClock()), Windows(0)
        self.table = UpdateTable(warmup_steps, self.windows)
        self.recorded: RecordedUpdates | None = None  # its module, which not every fit needs, is not imported yet
        self.analysis: StepAnalysis | None = None
        self._exchanges: Exchanges | None = None
        self._compilation: Compilation | None = None
        self.failure: str | None = None
        self.ended: str | None = None
        self.kernel_s: float | None = None
        self._watch: ProgramWatch | None = None
        self._programs = ""  # that took most of the processor; nothing but the terminal has their names
        self._active = False
        self._in_batch = False  # whether Lightning trains on a batch
        self._hook: ProfilerHook | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether the steps of a fit are being measured."""
        return self._active

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the summary, as `throughput`, and what was compiled, as `compilation`."""
        compilation = self._compilation.facts if self._compilation is not None else None
        return {"throughput": self.summary, "compilation": compilation or None}

    def summary_lines(self) -> list[str]:
        """For the run's last lines: what ran, how fast, what limits it, and what to try."""
        from ._run_words import headline

        return headline(self.summary, self._programs) if self.verbose else []

    def detail_lines(self) -> list[str]:
        """For the details of a run: every number, and the evidence."""
        from ._run_words import details

        compiled = self._compilation.lines() if self._compilation is not None else []
        return [*details(self.summary), *compiled] if self.verbose else []

    def step_times(self) -> StepTimes | None:
        """After the fit: the time of each measured step, to be kept with `write_step_times`; None without a summary."""
        return self.table.times() if "updates" in self.summary else None

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

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._active = False
        self._stop_recording()
        for one in (self._exchanges, self._compilation):
            if one is not None:
                one.stop()

    # --- the fit ------------------------------------------------------------------------------------------------------

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.analysis = None  # of an earlier fit
            from ._analysis import StepAnalysis

            self.summary, self.failure = _nothing("no batch was trained"), None
            self.analysis = StepAnalysis(trainer, pl_module, self.flops_per_sample, self.calibrate)

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.analysis is None:  # it could not begin
            return
        from ._communication import Exchanges
        from ._compilation import Compilation
        from ._recording import RecordedUpdates

        self.teardown(trainer, pl_module, "fit")  # of an earlier fit that has ended early
        self._watch_programs(trainer)
        self.summary, self.operations, self.ended, self.kernel_s = {}, None, None, None
        self.timer = StepTimer(clock_for(trainer.strategy.root_device), trainer.global_step)
        self.recorded = RecordedUpdates(trainer, pl_module, self.record_operations, lambda: self.timer.part)
        self._first_counted = max(1, self.warmup_steps, self.recorded.last)
        self.windows, self._windows_read = Windows(self._first_counted), 0
        self.table = UpdateTable(self.warmup_steps, self.windows, trainer.global_step)
        self._writer = StepWriter(trainer, self.details)
        unused = {hook for hook in PREPARING if not overrides(trainer, hook)}
        actions = frozenset((*PARTS_OF_ACTIONS, _BATCH)) - unused
        self._exchanges = Exchanges(trainer, self.timer.clock)
        self._compilation = Compilation(trainer, pl_module)
        self._hook = ProfilerHook.attach(trainer, actions, self._on_action_start, self._on_action_end)
        self._active = True
        add_timer(trainer, self.timer)
        join(trainer, self)
        self._started = time.perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)
        leave(trainer, self)
        # A rank that has stopped measuring, or has measured no step, gives None; the others wait for it.
        steps = gather(self._own_ms(), trainer.world_size) if trainer.world_size > 1 else []
        self._sum_up(steps)
        self._conclude(trainer, steps)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # a test that fails changes nothing of what a fit has measured
            return
        # Other ranks may be gone: nothing is gathered from them, and the device may wait for them for ever.
        self._finish(trainer, wait=False)
        leave(trainer, self)
        self.summary |= _nothing(f"the fit ended with {type(exception).__name__}")

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach(trainer)
        self.disable()
        leave(trainer, self)

    def _detach(self, trainer: Trainer) -> None:
        remove_timer(trainer, self.timer)
        if self._hook is not None:
            self._hook.detach(trainer)
            self._hook = None

    @never_raise
    def _finish(self, trainer: Trainer, wait: bool = True) -> None:
        """Read what is left, with `wait` after waiting for the device, and measure no more."""
        if not self._active:
            return
        self._detach(trainer)
        self._stop_recording()
        self.timer.end_step()
        self.windows.end(self.timer.updates)
        self._flush(trainer, wait, is_over=wait)  # without `wait` the fit may have ended in the middle of an update
        self.disable()
        seconds = time.perf_counter() - self._started - self.timer.paused_s
        if cost := cost_of(self.table, replicas(trainer), seconds):
            on_host = trainer.strategy.root_device.type == "cpu"  # an accelerator's host has free cores for others
            windows = self.windows.facts(slowed_only=not on_host)
            self.summary = cost | windows | ({"ended": self.ended} if self.ended else {})
            self._name_programs()
            if wait and self._exchanges is not None:
                self.summary |= self._exchanges.facts()

    def _watch_programs(self, trainer: Trainer) -> None:
        """Begin to watch what other programs take; a sweep watches for its runs, whose output goes to a file."""
        self._programs = ""
        self._watch = ProgramWatch([root_of_run()]) if trainer.is_global_zero and not is_in_sweep() else None
        if self._watch is not None:
            self._watch.sample()

    def _name_programs(self) -> None:
        share = self.summary.get("others_share", 0.0)
        if self._watch is not None and share >= LOAD_SAID:
            self._watch.sample()
            self._programs = self._watch.most_of(share)

    def _own_ms(self) -> float | None:
        """The mean step of this rank without its waits for others; NaN where these are not measured.

        They are in the exchange of gradients, and in `other`: rank 0 tells the others of signals after each batch.
        """
        if "step_ms" not in self.summary:
            return None
        waits = self.summary["parts_ms"]["other"] + self.summary.get("communication_ms", math.nan)
        return self.summary["step_ms"] - waits

    @never_raise
    def _sum_up(self, steps: list[float | None]) -> None:
        """Complete this rank's summary, given `_own_ms` of every rank."""
        if None in steps:
            self.summary = {}
        elif self.summary and self.analysis is not None and self.recorded is not None:
            spans, known = self.timer.spans.all(), [step for step in steps if step is not None]
            self.summary = self.analysis.summary(self.summary, self.table, self.recorded, spans, known, self.kernel_s)
            self.operations = self.analysis.operations

    @never_raise
    def _conclude(self, trainer: Trainer, steps: list[float | None]) -> None:
        """Say why there is no summary, where there is none, and print it."""
        if not self.summary:
            why = self.failure and f"the measurement ended with {self.failure}"
            is_other = None in steps and steps[trainer.global_rank] is not None
            stopped = f"rank {steps.index(None)} has stopped measuring" if is_other else None
            self.summary = _nothing(why or stopped or self._why_nothing_is_known())
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
        if (self.table.rows["flags"] & INVALID).all() or not (self.table.rows["flags"] & RECORDED)[-1]:
            return "no step has a time: the clock has jumped"
        return "every step was profiled or recorded, which makes it slower"

    # --- a batch ------------------------------------------------------------------------------------------------------

    @never_raise
    def _on_action_start(self, action: str) -> None:
        if not self._active:
            return
        if action == _BATCH:
            self._in_batch = True
            if self.timer.current is None or self.timer.current.trained:  # the step itself will ask for its batch
                self._begin_batch()
            self._record()
            return
        if action == REQUEST and not self._in_batch:
            self._begin_batch()
        elif PARTS_OF_ACTIONS[action] == PAUSE:
            self._stop_recording()
        self.timer.enter(PARTS_OF_ACTIONS[action])

    @never_raise
    def _on_action_end(self, action: str) -> None:
        if action == _BATCH:
            self._in_batch = False
        elif self._active and action != VALIDATION:
            self.timer.leave(PARTS_OF_ACTIONS[action])

    def _begin_batch(self) -> None:
        """Begin a batch, and a window where it is time: what a window's border costs is in no step."""
        self._stop_recording()  # of the batch before
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
        assert self.recorded is not None
        self.recorded.start(self.timer.updates + 1, self.timer.global_step)
        if batch is not None:  # another callback or the user may record or trace it, too
            batch.recorded |= self.recorded.active or any_mode() or is_profiler_active()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        timed = self.timer.current if self._active else None
        if timed is not None and not timed.trained:
            self._count(timed, trainer, pl_module, batch)
            require_number("batch_size_fn", timed.samples)
            require_number("timesteps_fn", timed.timesteps)

    @never_raise
    def _count(self, timed: Batch, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """What a batch holds."""
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
            if self._exchanges is not None:
                self._exchanges.end_backward()

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        timed = self.timer.current
        if self._active and timed is not None:
            if not timed.samples:  # of a step that asked for its batch
                self._count(timed, trainer, pl_module, batch)
            if self.recorded is not None:
                self.recorded.count(timed.samples)
        if self._active:
            self.timer.end_batch(trainer.global_step)
            if len(self.timer.finished) >= FLUSH_EVERY or len(self.windows.all) > self._windows_read:
                self._flush(trainer, wait=False)

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active and self.timer.part != PAUSE:  # while gradients are accumulated no action comes before this
            self._stop_recording()
            self.timer.enter(PAUSE)
        self._end_step(trainer)

    @override
    @never_raise
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            self.timer.leave(PAUSE)

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._end_step(trainer)

    @override
    @never_raise
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:  # the time between two epochs is in no step
            self._stop_recording()
            self.timer.end_step()
            self._flush(trainer, wait=True)

    def _end_step(self, trainer: Trainer) -> None:
        """End the step before a validation or a checkpoint, which the curves reach up to."""
        if self._active and self.timer.current is not None and self.timer.current.trained:
            self.timer.end_step()
            self._flush(trainer, wait=True)

    # --- marks become rows, and rows become curves --------------------------------------------------------------------

    def oldest_step(self) -> float:
        """The first step that is not yet in the table."""
        return self.table.last_step + 1 if self._active else math.inf

    def _flush(self, trainer: Trainer, wait: bool, is_over: bool = False) -> None:
        """Turn marks into rows of the table as far as they can be read without waiting, and write these."""
        with pause(trainer, part_of_fit=True):
            self._windows_read = len(self.windows.all)
            clock, finished, batches = self.timer.clock, self.timer.finished, []
            if wait and finished:
                clock.wait(finished[-1].end)
            while finished and clock.ready(finished[0].end):
                batches.append(finished.popleft())
            before = self.table.last_step
            rows = self.table.add([batch for batch in batches if batch.trained], clock)
            for batch in batches:
                clock.reuse(batch.moments[:-1])  # the last moment is the next batch's first
            assert self.analysis is not None and self.recorded is not None
            if self.recorded.is_over or is_over:
                self.analysis.learn(self.recorded)
            is_written = (rows["flags"] & (FIRST | RECORDED | INVALID)) == 0
            steps = numpy.concatenate([[before], rows["step"]])
            is_due = passes(steps[:-1], steps[1:], self.every_n_steps) if self.every_n_steps else False
            rows = rows[is_written & is_due]
            if len(rows):
                together, per_sample = replicas(trainer), self.analysis.per_sample
                per_device = per_sample and per_sample * together / trainer.world_size
                scalars = metrics_of(rows, together, per_device, self.analysis.peak)
                recent = self.table.step_ms(slice(-FLUSH_EVERY, None))  # rows of a window may be one or two
                self._writer.write(scalars, always=stalls_among(rows, float(numpy.median(recent))))


def _nothing(why: str) -> dict[str, Any]:
    """A summary that only says why there is no verdict."""
    return {"missing": {"bottleneck": why}}
