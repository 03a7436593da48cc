"""ThroughputMonitor: what every training step costs, in which part, and how much it gets done."""

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from typing_extensions import override

from ..distributed.gather import gather
from ..options.types import NonNegativeInt
from ..records.step_times import StepTimes
from ..records.terminal import block, is_verbose, say
from ._cost import cost_of, metrics_of, stalls_among
from ._never_raise import never_raise
from ._step_monitor import FLUSH_EVERY, StepMonitor
from ._table import FIRST, INVALID, RECORDED
from ._writer import StepWriter

if TYPE_CHECKING:
    from ..records.operations import StepOperations
    from ._analysis import StepAnalysis


class ThroughputMonitor(StepMonitor):
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
        timesteps_fn: the time steps of a batch, all samples together. Without it a loader with an attribute `timesteps` says
            it, and else a module whose `spec.kind` is `sequence` has `spec.input_shape[0]` time steps a sample.
        flops_per_sample: forward and backward, for modules whose steps cannot be recorded: compiled and sharded ones.
        calibrate: whether the device's peak may be measured (once, for some seconds; the result is cached). Without
            a measured peak there is no MFU.
        record_operations: whether the operations of the updates 2 to 4 are recorded: the FLOPs of a sample, and evidence
            for the bottleneck. These updates are slower, and no rate is read from them.
        verbose: whether the summary is printed when training ends; `train.py` prints it with the run's last lines.
        details: whether TensorBoard gets the parts of a step, FLOP/s and batches/s too. CSV has them in any case.
    """

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
        super().__init__(warmup_steps)
        for name, function in (("batch_size_fn", batch_size_fn), ("timesteps_fn", timesteps_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}: got {function!r}, takes {{_target_: …, _partial_: true}} of a function")
        self.every_n_steps = 1 if every_n_steps is None else every_n_steps
        self.batch_size_fn = batch_size_fn
        self.timesteps_fn = timesteps_fn
        self.flops_per_sample = flops_per_sample
        self.calibrate = calibrate
        self.record_operations = record_operations
        self.verbose = verbose
        self.details = details
        self.summary: dict[str, Any] = {}
        self.operations: StepOperations | None = None
        self.ended: str | None = None  # why a timed run has ended
        self._analysis: StepAnalysis | None = None  # of this fit

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

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._analysis = None  # of an earlier fit
            from ._analysis import StepAnalysis

            self.summary, self.failure = _nothing("no batch was trained"), None
            if self.every_n_steps == 0:
                rank_zero_warn("ThroughputMonitor(every_n_steps=0) writes no step to the loggers, only the summary")
            self._analysis = StepAnalysis(trainer, pl_module, self.flops_per_sample, self.calibrate)

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._analysis is None:  # it could not begin
            return
        from ._recording import RecordedUpdates

        self.summary, self.operations, self.ended = {}, None, None
        self._writer = StepWriter(trainer, self.details)
        self._begin_fit(trainer, pl_module, RecordedUpdates(self.record_operations))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)
        # A rank that has stopped measuring gives None; the others wait for it.
        steps = gather(self.summary.get("step_ms"), trainer.world_size) if trainer.world_size > 1 else []
        self._sum_up(trainer, steps)
        self._conclude(trainer, steps)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Other ranks may be gone: nothing is gathered from them, and the device may wait for them for ever.
        self._finish(trainer, wait=False)
        self.summary |= _nothing(f"the fit ended with {type(exception).__name__}")

    @override
    def _take(self, trainer: Trainer, rows: NDArray[Any], is_over: bool) -> None:
        """Write rows, with the FLOPs of a sample as soon as they are known."""
        assert self._analysis is not None and self.recorded is not None
        if self.recorded.is_over or is_over:
            self._analysis.learn(self.recorded)
        is_written = (rows["flags"] & (FIRST | RECORDED | INVALID)) == 0
        rows = rows[is_written & (rows["step"] % self.every_n_steps == 0)] if self.every_n_steps else rows[:0]
        if len(rows):
            scalars = metrics_of(rows, trainer.world_size, self._analysis.per_sample, self._analysis.peak)
            recent = self.table.step_ms(slice(-FLUSH_EVERY, None))  # rows of a window may be one or two
            self._writer.write(scalars, always=stalls_among(rows, float(numpy.median(recent))))

    @never_raise
    def _finish(self, trainer: Trainer, wait: bool = True) -> None:
        if self._active:
            seconds = self._end_fit(trainer, wait)
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
        elif cost and self._analysis is not None and self.recorded is not None:
            self.summary = self._analysis.summary(cost, self.table, self.recorded, self.timer.spans.all(), measured)
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
