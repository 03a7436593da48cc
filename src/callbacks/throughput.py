"""ThroughputMonitor: what every training step costs, in which part, and how much it gets done.

Each fit has a Measurement of its own. After the fit `Measured` has all that is known of it, and the summary is a report on that.
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
from ._own import tell

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

    Logs `time/step_ms`, its parts and `throughput/…` of every update but the first and those that are
    recorded; docs/measuring.md has units and meanings.
    Validation and checkpoints are excluded from the step. With accumulated gradients a step is an update of several
    batches.

    The times are the device's own on CUDA, read from events that have passed: no synchronisation, no `.item()`.
    Elsewhere they are the host's. On MPS the step and the host's wait for data are timed, and all else of a step is `other`:
    see `MpsClock`. Manual optimisation shows the parts that it calls by Lightning's names
    (`manual_backward`, `optimizer.step()`), and the rest as forward.

    After the fit `summary` has the run's cost, rates and bottleneck; the run's record has it as `throughput`. Where it has no
    bottleneck, FLOP/s or MFU, `summary["missing"]` says why. `operations` has those of a step, if they were recorded, and `memory()`
    what a step holds.
    Under DDP the summary says how long a step waits for gradients. The time in which torch.compile compiles is in no step.

    Args:
        every_n_steps: write every n-th step to the loggers; all are measured. 0 writes none.
        warmup_steps: left out of the summary; with `record_operations` at least the first four are, five on CUDA, and eight there
            of a compiled module. A fit that is no longer has no rate.
        batch_size_fn: the samples of a batch, where `SampleCounter` finds no tensor or list that has their number.
        timesteps_fn: the time steps of a batch, all samples together. Without it a loader with an attribute `timesteps` says
            it, and else a module whose `spec.kind` is `sequence` has `spec.input_shape[0]` time steps a sample.
        flops_per_sample: forward and backward, for modules whose steps cannot be recorded: compiled and sharded ones.
        calibrate: whether the device's peak may be measured (once, for some seconds; the result is cached). Without
            a measured peak there is no MFU.
        record_operations: whether the operations of the updates 2 to 4 are recorded: the FLOPs of a sample, and evidence
            for the bottleneck; and what the memory of a step consists of. These updates are slower, and no rate is read from them.
        verbose: whether the summary is printed when training ends; `train.py` prints it with the run's last lines.

    Attributes:
        table: the updates of this fit, or of the last one; there is none before the first.
        measured: what the last fit has measured, once there is a summary; with `calibration`, that of the device, the
            report's arguments.
        failure: the exception that has ended the measurement.
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
        self.calibration_s = 0.0  # that finding it has taken
        self.failure: str | None = None
        self._measurement: Measurement | None = None  # of this fit, or of the last one
        self._is_fitting = False

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, also in another process: parameters and results, and nothing that measures a fit."""
        of_fit = ("_measurement", "_listener", "_timer", "_hook")
        known = {name: value for name, value in vars(self).items() if name not in of_fit}
        return known | {"_measurement": None, "is_measuring": False, "_is_fitting": False}

    @property
    def _of_fit(self) -> "Measurement":
        if self._measurement is None:
            raise RuntimeError("no training has begun")
        return self._measurement

    @property
    def operations(self) -> "StepOperations | None":
        """Those of a step of the last fit, if they were recorded."""
        return None if self.measured is None else self.measured.step_operations(self.calibration)

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the summary, as `throughput`, and the memory of a step, as `memory`."""
        return {"throughput": self.summary} | ({"memory": held} if (held := self.memory()) else {})

    def memory(self) -> dict[str, Any]:
        """What the memory of a step consists of, as far as the fit has gone; empty without recorded operations."""
        return self._measurement.recorded.memory() if self._measurement else {}

    def summary_lines(self) -> list[str]:
        """For the run's last lines: what ran, how fast, what limits it, and what to try."""
        from ._run_words import headline

        programs = self._measurement.programs if self._measurement else ""
        return headline(self.summary, programs) if self.verbose else []

    def detail_lines(self) -> list[str]:
        """For the details of a run: every number, and the evidence."""
        from ._run_words import details

        return details(self.summary) if self.verbose else []

    def step_times(self) -> "StepTimes | None":
        """After the fit: the time of each measured step, to be kept with `write_step_times`; None without a summary."""
        return self.table.times() if self._cost else None

    def recorded_step(self) -> "list[OperationRow]":
        """The operations of the last recorded update, in their order."""
        steps = self._measurement.recorded.recorder.steps if self._measurement else []
        return steps[-1] if steps else []

    # --- what other callbacks tell of a fit ---------------------------------------------------------------------------

    @property
    def first_counted(self) -> int:
        """The updates before the first that counts; 0 before the fit."""
        return self._measurement.windows.first if self._measurement else 0

    @property
    def is_warm(self) -> bool:
        """Whether the next update counts."""
        return self._of_fit.timer.updates.count >= self.first_counted

    def measure_by_clock(self, by_clock: bool) -> None:
        """Whether windows follow each other by the clock, as at first, or are those that others begin and end."""
        self._of_fit.windows.in_passes = not by_clock
        self._of_fit.is_visited |= not by_clock

    def begin_window(self, pass_: int) -> None:
        """Between two updates, begin a window that lasts until `end_window`."""
        timer = self._of_fit.timer
        timer.end_step()
        self._of_fit.windows.begin(timer.updates.count, pass_)

    def end_window(self, trainer: Trainer) -> dict[str, Any]:
        """After an update, end the window and read its steps, which waits for the device; what it has measured."""
        fit = self._of_fit
        fit.timer.end_step()
        window = fit.windows.end(fit.timer.updates.count)
        fit.flush(trainer)
        return fit.table.window_facts(window) if window else {}

    def end(self, reason: str) -> None:
        """The fit is ended for this reason, which the summary says."""
        if self._measurement:
            self._measurement.ended = reason

    def exclude(self) -> None:
        """The update that is being trained is made slower by what the caller does, and counts in no rate."""
        if self._measurement and self._measurement.timer.current is not None:
            self._measurement.timer.current.recorded = True

    def set_kernel_time(self, seconds: float) -> None:
        """Kernels run for so long in a step, by a trace."""
        if self._measurement:
            self._measurement.traced_s = seconds

    def disable(self) -> None:
        """Measure no more in this fit."""
        self.stop_listening()
        if self._measurement:
            self._measurement.stop()

    # --- the fit ------------------------------------------------------------------------------------------------------

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        from ..hardware.measure import find_calibration

        if stage == "fit":
            self.disable()
            self.summary, self.measured, self.failure = _nothing("no batch was trained"), None, None
            self._measurement, self._is_fitting = None, True
            began = time.perf_counter()
            try:
                device = trainer.strategy.root_device
                self.calibration = find_calibration(device, self.calibrate and trainer.is_global_zero)
            finally:  # a signal may end it
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
        self.table = self._measurement.table
        self._measurement.attach(trainer, pl_module)
        self.listen(trainer, self._measurement)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)
        # A rank that has stopped measuring, or has measured no step, gives None; the others wait for it.
        own = self._measurement.own_times if self._measurement else None
        ranks = gather(own, trainer.world_size) if trainer.world_size > 1 else []
        if self._measurement and None in ranks:
            self._measurement.cost = {}
        self._sum_up(trainer, pl_module, ranks)
        self._conclude(trainer)
        self._is_fitting = False

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # A test that fails, or a fit before its `setup`, changes nothing of what the fit before it has measured.
        if trainer.state.fn != TrainerFn.FITTING or not self._is_fitting:
            return
        # Other ranks may be gone: nothing is gathered from them, and the device may wait for them for ever.
        self._finish(trainer, wait=False)
        self.summary = (self.summary or self._cost) | _nothing(f"the fit ended with {type(exception).__name__}")

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
            self._of_fit.finish(trainer, wait)
            self.disable()

    @never_raise
    def _sum_up(self, trainer: Trainer, module: LightningModule, ranks: "list[RankTimes]") -> None:
        """Sum up the fit, given the own times of every rank."""
        from ._report import report

        if self._cost:
            self.measured = self._of_fit.result(trainer, module, ranks)
            self.summary = report(self.measured, self.calibration)

    @never_raise
    def _conclude(self, trainer: Trainer) -> None:
        """Say why there is no verdict, where there is none, and print the summary."""
        if "title" not in self.summary:
            why = f"the measurement ended with {self.failure}" if self.failure else self._of_fit.why_nothing_is_known()
            self.summary = self._cost | _nothing(why)
        tell(trainer, [*self.summary_lines(), *(self.detail_lines() if is_verbose() else [])])


def _nothing(why: str) -> dict[str, Any]:
    """A summary that only says why there is no verdict."""
    return {"missing": {"bottleneck": why}}
