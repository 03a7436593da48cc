"""ThroughputMonitor: the time of every training step and of its parts, and the rates of samples and FLOPs.

Each fit has its own Measurement. After the fit `Measured` holds all results, and the summary is a report on them.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from ..distributed.gather import gather
from ..options.types import NonNegativeInt
from ..records.terminal import is_verbose
from ._events import LoopEvents
from ._never_raise import never_raise
from ._training_program import print_last_lines

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration
    from ..hardware.slow_rank import RankTimes
    from ..records.operations import OperationRow, StepOperations
    from ..records.step_times import StepTimes
    from ._measured import Measured
    from ._measurement import Measurement
    from ._table import UpdateTable


class ThroughputMonitor(LoopEvents):
    """Times every training step and its parts, in any Lightning project, without touching the module.

    Logs `time/step_ms`, its parts and `throughput/…` for every update except the first and the recorded ones;
    docs/measuring.md has units and meanings. Validation and checkpoints are excluded from the step. With accumulated
    gradients a step is an update of several batches.

    On CUDA the times are the device's own, read from events that have passed: no synchronisation, no `.item()`.
    Elsewhere the times are the host's. On MPS only the step and the host's wait for data are timed, and the rest of a step is
    `other`: see `MpsClock`. Under manual optimisation the calls of `manual_backward` and `optimizer.step()` are timed as
    backward and optimizer, and the rest as forward.

    After the fit `summary` has the run's cost, rates and bottleneck; the run's record has it as `throughput`. Where the
    bottleneck, FLOP/s or MFU is missing, `summary["missing"]` says why. `operations` has the operations of a step, if they
    were recorded, and `memory()` the memory that a step uses.
    Under DDP the summary says how long a step waits for gradients. Compilation by torch.compile is excluded from the step.

    Args:
        every_n_steps: write every n-th step to the loggers; 0 writes none. All steps are measured.
        warmup_steps: updates that the summary leaves out. With `record_operations` it leaves out at least the first four; on
            CUDA five, and eight for a compiled module. A fit without further updates has no rate.
        batch_size_fn: returns the samples of a batch, where `SampleCounter` finds no tensor or list with an item for each.
        timesteps_fn: returns the time steps of a batch, summed over its samples. Without it the loader's attribute
            `timesteps` counts, and else a module whose `spec.kind` is `sequence` has `spec.input_shape[0]` time steps a sample.
        flops_per_sample: forward and backward, for modules whose steps cannot be recorded (compiled or sharded).
        calibrate: whether the device's peak may be measured (once, for some seconds; the result is cached). Without
            a measured peak there is no MFU.
        record_operations: whether the operations of the updates 2 to 4 are recorded, for the FLOPs of a sample, the evidence
            for the bottleneck and the parts of a step's memory. These updates are slower, and no rate includes them.
        verbose: whether the summary is printed when training ends; `train.py` prints it with the run's last lines.

    Attributes:
        table: the updates of this fit, or of the last one; missing before the first fit.
        measured: the results of the last fit, once it has a summary.
        calibration: the device's, which `report` takes beside `measured`.
        failure: the exception that ended the measurement.
    """

    observes_only = True
    table: "UpdateTable"

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
    ):
        super().__init__()
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
        self.summary: dict[str, Any] = {}
        self.measured: Measured | None = None
        self.calibration: Calibration | None = None
        self.calibration_s = 0.0  # the time to find the calibration
        self.failure: str | None = None
        self._measurement: Measurement | None = None  # that of this fit, or of the last fit
        self._is_fitting = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, also for another process: parameters and results, without what measures a fit."""
        fit_attributes = ("_measurement", "_listener", "_timer", "_profiler_hook")
        state = {name: value for name, value in vars(self).items() if name not in fit_attributes}
        return state | {"_measurement": None, "is_measuring": False, "_is_fitting": False, "began": None}

    @property
    def _required_measurement(self) -> "Measurement":
        if self._measurement is None:
            raise RuntimeError("no training has begun")
        return self._measurement

    @property
    def operations(self) -> "StepOperations | None":
        """Return the operations of one step of the last fit; None where none were recorded."""
        return None if self.measured is None else self.measured.step_operations(self.calibration)

    def record_facts(self) -> dict[str, Any]:
        """Return the summary as `throughput` and the memory of a step as `memory`, for the run's record."""
        return {"throughput": self.summary} | ({"memory": memory} if (memory := self.memory()) else {})

    def memory(self) -> dict[str, Any]:
        """Return the parts of a step's memory, as measured so far; empty without recorded operations."""
        return self._measurement.recorded_updates.memory() if self._measurement else {}

    def summary_lines(self) -> list[str]:
        """Return the run's last lines: what ran, how fast, what limits it, and what to try."""
        from ._run_words import headline

        programs = self._measurement.programs if self._measurement else ""
        return headline(self.summary, programs) if self.verbose else []

    def detail_lines(self) -> list[str]:
        """Return the lines of a run's details: every number, and the evidence for the bottleneck."""
        from ._run_words import details

        return details(self.summary) if self.verbose else []

    def step_times(self) -> "StepTimes | None":
        """Return the time of each measured step after the fit, for `write_step_times`; None without a summary."""
        return self.table.step_times() if "updates" in self.summary else None

    def recorded_step(self) -> "list[OperationRow]":
        """Return the operations of the last recorded update, in the order of their calls."""
        steps = self._measurement.recorded_updates.recorder.steps if self._measurement else []
        return steps[-1] if steps else []

    # --- for other callbacks, during a fit ----------------------------------------------------------------------------

    @property
    def first_counted(self) -> int:
        """Return the index, from 0, of the first counted update; 0 before the fit."""
        return self._measurement.windows.first_update if self._measurement else 0

    @property
    def is_warm(self) -> bool:
        """Whether the next update is counted, because the warm-up is over."""
        return self._required_measurement.timer.updates.count >= self.first_counted

    @property
    def batch_samples(self) -> int | None:
        """Return the samples of the batch that was counted last; None while no fit is measured."""
        return self._required_measurement.batch_samples if self.is_measuring else None

    def measure_by_clock(self, by_clock: bool) -> None:
        """Begin and end windows by the clock, as by default, or only with `begin_window` and `end_window`."""
        self._required_measurement.windows.in_passes = not by_clock
        self._required_measurement.is_visited |= not by_clock

    def begin_window(self, pass_: int) -> None:
        """Begin a window between two updates; it lasts until `end_window`."""
        timer = self._required_measurement.timer
        timer.end_step()
        self._required_measurement.windows.begin(timer.updates.count, pass_)

    def end_window(self, trainer: Trainer) -> dict[str, Any]:
        """End the window after an update, wait for the device, and return `UpdateTable.summarize_window`."""
        measurement = self._required_measurement
        measurement.timer.end_step()
        window = measurement.windows.end(measurement.timer.updates.count)
        measurement.flush(trainer)
        return measurement.table.summarize_window(window) if window else {}

    def set_end_reason(self, reason: str) -> None:
        """Set the reason for which a callback ends the fit; the summary has it as `ended`."""
        if self._measurement:
            self._measurement.end_reason = reason

    def exclude_update(self) -> None:
        """Leave the current update out of all rates, because the caller slows it down."""
        if self._measurement and self._measurement.timer.current is not None:
            self._measurement.timer.current.is_recorded = True

    def set_kernel_time(self, seconds: float) -> None:
        """Set the seconds of a step in which kernels run, as read from a trace."""
        if self._measurement:
            self._measurement.traced_s = seconds

    def disable(self) -> None:
        """Stop measuring in this fit."""
        self.stop_listening()
        if self._measurement:
            self._measurement.stop()

    # --- the fit ------------------------------------------------------------------------------------------------------

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            from ..hardware.measure import find_calibration
            from . import _measurement  # noqa: F401 - here, so that its import is in no part of the fit

            self.disable()
            self.summary, self.measured, self.failure = _without_verdict("no batch was trained"), None, None
            self._measurement, self._is_fitting = None, True
            began = time.perf_counter()
            try:
                device = trainer.strategy.root_device
                self.calibration = find_calibration(device, self.calibrate and trainer.is_global_zero)
            finally:  # a signal may interrupt the calibration
                self.calibration_s = time.perf_counter() - began

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from ._measurement import Measurement

        if self.failure is not None:
            return
        self.disable()  # an earlier fit may have ended early
        self.summary = {}
        self._measurement = Measurement(self, trainer, pl_module)
        self.began = None
        self.table = self._measurement.table
        self._measurement.attach(trainer, pl_module)
        self.listen(trainer, self._measurement)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_fitting:  # added in mid-fit: it has measured an earlier fit, if any
            self.summary, self.measured, self._measurement = {}, None, None
        self._finish(trainer)
        # Every rank takes part, because the others wait for it; one that failed or measured no step sends None.
        rank_times = self._measurement.rank_times if self._measurement else None
        ranks = gather(rank_times, trainer.world_size) if trainer.world_size > 1 else []
        if self._measurement and None in ranks:
            self._measurement.cost = {}
        self._summarize(trainer, pl_module, ranks)
        self._complete_summary(trainer)
        self._is_fitting = False

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # The results of the last fit stay where a test fails, or a new fit fails before its `setup`.
        if trainer.state.fn != TrainerFn.FITTING or not self._is_fitting:
            return
        # Other ranks may have ended: gather nothing, and do not wait for the device, which may wait for them forever.
        self._finish(trainer, wait=False)
        self.summary = (self.summary or self._cost) | _without_verdict(f"the fit ended with {type(exception).__name__}")
        self._is_fitting = False

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.disable()

    @property
    def _cost(self) -> dict[str, Any]:
        return self._measurement.cost if self._measurement else {}

    @never_raise
    def _finish(self, trainer: Trainer, wait: bool = True) -> None:
        if self.is_measuring:
            self._required_measurement.finish(trainer, wait)
            self.disable()

    @never_raise
    def _summarize(self, trainer: Trainer, module: LightningModule, ranks: "list[RankTimes]") -> None:
        """Make the summary of the fit from its results and the times of every rank."""
        from ._report import report

        if self._cost:
            self.measured = self._required_measurement.result(trainer, module, ranks)
            self.summary = report(self.measured, self.calibration)

    @never_raise
    def _complete_summary(self, trainer: Trainer) -> None:
        """Add the reason to a summary without a verdict, and print the summary."""
        if "title" not in self.summary:
            reason = f"the measurement ended with {self.failure}" if self.failure else "the callback was added too late"
            if self._measurement and not self.failure:
                reason = self._measurement.why_no_step_counts()
            self.summary = self._cost | _without_verdict(reason)
        print_last_lines(trainer, [*self.summary_lines(), *(self.detail_lines() if is_verbose() else [])])


def _without_verdict(reason: str) -> dict[str, Any]:
    """Return a summary that has only the reason for the missing verdict."""
    return {"missing": {"bottleneck": reason}}
