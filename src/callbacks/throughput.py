"""ThroughputMonitor: what every training step costs, in which part, and how much it gets done.

`LoopEvents` marks the parts of each batch on a StepTimer. Finished batches become rows of an UpdateTable
some time later, when their marks can be read without waiting for the device. Curves are views of the table. After the
fit `Measured` has all that is known of it, and the summary is a report on that.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from .._lightning import callback_of, skips_backward
from .._torch import any_mode, is_profiler_active, watch_compilation
from ..distributed.gather import gather, replicas
from ..errors import UserError
from ..hardware.bottleneck import CHANGED
from ..hardware.calibration import Calibration
from ..hardware.devices import device_name
from ..hardware.measure import find_calibration
from ..hardware.nvml_readings import POWER, UTILIZATION
from ..hardware.processor import root_of_run
from ..hardware.programs import ProgramWatch
from ..hardware.slow_rank import RankTimes
from ..hardware.telemetry import named
from ..options.types import NonNegativeInt
from ..records.operations import OperationRow, StepOperations
from ..records.rates import LOAD_SAID
from ..records.step_times import StepTimes
from ..records.terminal import block, is_in_sweep, is_verbose, say
from ._batches import SampleCounter, timesteps_of
from ._communication import Exchanges
from ._cost import cost_of, median_step, metrics_of, own_times
from ._events import LoopEvents
from ._kernel_time import KernelTime
from ._level import spans_of
from ._measured import Measured, step_operations
from ._never_raise import never_raise
from ._recording import LAST_RECORDED, Flops, RecordedUpdates, is_compiled_module
from ._report import peak_of, report
from ._run_words import details, headline
from ._setting import own_config, setting_of, title_of
from ._table import FIRST, INVALID, RECORDED, UpdateTable
from ._timer import Batch, HostClock, StepTimer, clock_for, pause
from ._updates import passes
from ._windows import Windows
from ._writer import StepWriter
from .device import DeviceMonitor

FLUSH_EVERY = 100  # batches read together
_OF_ALL_RUNS = {named(key, "mean") for key in (UTILIZATION, POWER)}  # on a device that runs share


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
        table: the updates of this fit, or of the last one.
        measured: what the last fit has measured, once there is a summary; with `calibration`, that of the device, the
            report's arguments.
        failure: the exception that has ended the measurement.
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
        self._is_visited = False
        self._windows = Windows(0)
        self.table = UpdateTable(warmup_steps, self._windows)
        self._recorded: RecordedUpdates | None = None  # before the first training
        self._is_fitting = False
        self._attached = contextlib.ExitStack()  # what ends with the measurement
        self._flops: Flops | None = None  # None before the recorded updates are over
        self._cost: dict[str, Any] = {}  # of a step, by this rank; empty where no step counts
        self._own_times: RankTimes | None = None  # None where no step counts, or this rank has stopped measuring
        self._ended: str | None = None  # why a timed run has ended
        self._traced_s: float | None = None  # of kernels in a step, by a trace
        self._watch: ProgramWatch | None = None  # what other programs take
        self._programs = ""  # that took most of the processor; nothing but the terminal has their names

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, also in another process: parameters and results, and nothing that measures a fit."""
        of_fit = ("_writer", "_exchanges", "_kernel_time")
        known = {name: value for name, value in vars(self).items() if name not in of_fit}
        known |= {"_timer": StepTimer(HostClock()), "_attached": contextlib.ExitStack()}
        return known | {"_recorded": None, "_watch": None, "is_measuring": False, "_is_fitting": False}

    @property
    def operations(self) -> StepOperations | None:
        """Those of a step of the last fit, if they were recorded."""
        return None if self.measured is None else step_operations(self.measured, self.calibration)

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the summary, as `throughput`, and the memory of a step, as `memory`."""
        return {"throughput": self.summary} | ({"memory": held} if (held := self.memory()) else {})

    def memory(self) -> dict[str, Any]:
        """What the memory of a step consists of, as far as the fit has gone; empty without recorded operations."""
        return self._recorded.memory() if self._recorded is not None else {}

    def summary_lines(self) -> list[str]:
        """For the run's last lines: what ran, how fast, what limits it, and what to try."""
        return headline(self.summary, self._programs) if self.verbose else []

    def detail_lines(self) -> list[str]:
        """For the details of a run: every number, and the evidence."""
        return details(self.summary) if self.verbose else []

    def step_times(self) -> StepTimes | None:
        """After the fit: the time of each measured step, to be kept with `write_step_times`; None without a summary."""
        return self.table.times() if self._cost else None

    def recorded_step(self) -> list[OperationRow]:
        """The operations of the last recorded update, in their order."""
        steps = self._recorded.recorder.steps if self._recorded is not None else []
        return steps[-1] if steps else []

    # --- what other callbacks tell of a fit ---------------------------------------------------------------------------

    @property
    def first_counted(self) -> int:
        """The updates before the first that counts; 0 before the fit."""
        return self._windows.first

    @property
    def is_warm(self) -> bool:
        """Whether the next update counts."""
        return self._timer.updates.count >= self.first_counted

    def measure_by_clock(self, by_clock: bool) -> None:
        """Whether windows follow each other by the clock, as at first, or are those that others begin and end."""
        self._windows.in_passes = not by_clock
        self._is_visited |= not by_clock

    def begin_window(self, pass_: int) -> None:
        """Between two updates, begin a window that lasts until `end_window`."""
        self._timer.end_step()
        self._windows.begin(self._timer.updates.count, pass_)

    def end_window(self, trainer: Trainer) -> dict[str, Any]:
        """After an update, end the window and read its steps, which waits for the device; what it has measured."""
        self._timer.end_step()
        window = self._windows.end(self._timer.updates.count)
        self.flush(trainer)
        return self.table.window_facts(window) if window else {}

    def end(self, reason: str) -> None:
        """The fit is ended for this reason, which the summary says."""
        self._ended = reason

    def exclude(self) -> None:
        """The update that is being trained is made slower by what the caller does, and counts in no rate."""
        if self._timer.current is not None:
            self._timer.current.recorded = True

    def set_kernel_time(self, seconds: float) -> None:
        """Kernels run for so long in a step, by a trace."""
        self._traced_s = seconds

    def disable(self) -> None:
        """Measure no more in this fit."""
        self.is_measuring, self._timer.current = False, None
        self._attached.close()

    # --- the fit ------------------------------------------------------------------------------------------------------

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.summary, self._cost, self._is_fitting = _nothing("no batch was trained"), {}, True
            self.measured, self.failure, self._is_visited, self._recorded = None, None, False, None
            device = trainer.strategy.root_device
            began = time.perf_counter()
            try:
                self.calibration = find_calibration(device, self.calibrate and trainer.is_global_zero)
            finally:  # a signal may end it
                self.calibration_s = time.perf_counter() - began

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.failure is not None:
            return
        self.disable()  # an earlier fit may have ended early
        is_alone = (
            trainer.is_global_zero and not is_in_sweep()
        )  # a sweep watches for its runs, whose output goes to a file
        self._programs, self._watch = "", ProgramWatch([root_of_run()]) if is_alone else None
        if self._watch is not None:
            self._watch.sample()
        self.summary, self._own_times, self._ended, self._traced_s = {}, None, None, None
        given = self.flops_per_sample
        self._flops = None if given is None else Flops(given, is_given=True)
        timer = StepTimer(clock_for(trainer.strategy.root_device), trainer.global_step)
        recorded = RecordedUpdates(trainer, pl_module, self.record_operations, lambda: timer.part)
        held = _held_update(trainer, pl_module, recorded, timer.clock.can_hold)
        self._recorded, self._kernel_time = recorded, KernelTime(timer.clock, held)
        first, device = max(1, self.warmup_steps, recorded.last, held), trainer.strategy.root_device.type
        self._windows, self._windows_read = Windows(first, device=device), 0
        self.table = UpdateTable(self.first_counted, self._windows, trainer.global_step, timer.clock.parts)
        self._writer = StepWriter(trainer)
        self._exchanges = Exchanges(trainer, timer)
        self._attached.callback(recorded.stop)
        self._attached.callback(self._exchanges.stop)
        if is_compiled_module(pl_module):  # what torch.compile takes is in no step, also where it compiles again
            self._attached.callback(watch_compilation(lambda: pause(trainer)))
        self._attached.callback(self.listen(trainer, timer))
        self._samples_in = self.batch_size_fn or SampleCounter(trainer.train_dataloader)
        self._timesteps = timesteps_of(pl_module)  # asked for once: a network has to look for it in all its parts
        self._counted_since = time.perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)
        # A rank that has stopped measuring, or has measured no step, gives None; the others wait for it.
        ranks = gather(self._own_times, trainer.world_size) if trainer.world_size > 1 else []
        if None in ranks:
            self._cost = {}
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

    @never_raise
    def _finish(self, trainer: Trainer, wait: bool = True) -> None:
        """Read what is left, with `wait` after waiting for the device, and measure no more."""
        if not self.is_measuring or self._recorded is None:
            return
        self.stop_recording()
        if self._timer.updates.count:
            self._recorded.measure_memory()
        self._timer.end_step()
        self._windows.end(self._timer.updates.count)
        self.flush(trainer, wait)
        self.disable()
        if cost := cost_of(self.table, replicas(trainer)):
            windows = self._windows.facts()
            self._cost = cost | windows | ({"ended": self._ended} if self._ended else {})
            share = windows.get("others_share", 0.0)
            if self._watch is not None and share >= LOAD_SAID:
                self._watch.sample()
                self._programs = self._watch.most_of(share)
            self._own_times = own_times(self.table)

    @never_raise
    def _sum_up(self, trainer: Trainer, module: LightningModule, ranks: list[RankTimes]) -> None:
        """Sum up the fit, given the own times of every rank."""
        cost, recorded, device = self._cost, self._recorded, trainer.strategy.root_device
        if not cost or recorded is None:
            return
        changed, kernel_s = self.table.changed(cost["work_ms_median"]), self._traced_s
        others = "the updates hold another number of batches than the recorded ones"
        not_recorded = recorded.why_no_operations or (others if self.table.has_other_batches() else None)
        is_whole = self._kernel_time.samples == self.table.whole_batch()
        if kernel_s is None and is_whole and 1 / CHANGED <= changed <= CHANGED:
            kernel_s = self._kernel_time.seconds
        monitor = callback_of(trainer, DeviceMonitor) or DeviceMonitor()
        sampled = monitor.result(self._counted_since)
        if self._windows.in_passes:  # the driver's means are of a time in which other runs were visited
            sampled = {key: value for key, value in sampled.items() if key not in _OF_ALL_RUNS}
        self.measured = Measured(
            title=title_of(module),
            device=device.type,
            device_name=device_name(device),
            precision=str(trainer.precision),
            cost=cost,
            setting=setting_of(trainer, cost["batch_size"]),
            ranks=ranks,
            sampled=sampled,
            operations=() if not_recorded else recorded.operations(),
            not_recorded=not_recorded,
            batch_bytes=recorded.batch_bytes,
            flops=self._flops or Flops(),
            changed=changed,
            median_parts_ms=median_step(self.table),
            median_steps=int(self.table.in_median().sum()),
            kernel_s=kernel_s,
            spans=spans_of(self.table, monitor.readings, self._fit.validations),
            fit_time={} if self._is_visited else self._fit.result(trainer, self.table.total_s()),
        )
        self.summary = report(self.measured, self.calibration)

    @never_raise
    def _conclude(self, trainer: Trainer) -> None:
        """Say why there is no verdict, where there is none, and print the summary."""
        if "title" not in self.summary:
            why = self.failure and f"the measurement ended with {self.failure}"
            self.summary = self._cost | _nothing(why or self._why_nothing_is_known())
        if trainer.is_global_zero and own_config(trainer.lightning_module) is None:
            lines = [*self.summary_lines(), *(self.detail_lines() if is_verbose() else [])]
            if lines:
                say(f"\n{block(lines)}")

    def _why_nothing_is_known(self) -> str:
        updates = self._timer.updates.count
        if not updates and self._timer.updates.step:
            return "all steps were trained before the run was resumed"
        if not updates:
            return (
                "Lightning has counted no optimizer step: no batch was trained, or a module that optimises by hand does "
                "not step the optimizers of self.optimizers()"
            )
        if updates <= self.first_counted:
            return f"of {updates} updates none came after the warm-up of {self.first_counted}"
        return (
            "no step counts: each was profiled or recorded, the clock has jumped, or another rank has stopped measuring"
        )

    # --- a batch ------------------------------------------------------------------------------------------------------

    @override
    def begin_batch(self) -> None:
        self.stop_recording()
        updates = self._timer.updates
        if updates.count <= self.first_counted:
            self._counted_since = time.perf_counter()
        if updates.is_between and self._windows.is_due(updates.count):
            with self._timer.pause():  # what a window's border costs is in no step
                self._windows.begin(updates.count)
        super().begin_batch()
        self._kernel_time.start(updates.count + 1)

    @override
    def count_batch(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        timed = self._timer.current
        if timed is not None and self._recorded is not None:
            self._count(timed, trainer, batch)
            self._recorded.expect(batch)
            for name, counted in (("batch_size_fn", timed.samples), ("timesteps_fn", timed.timesteps)):
                if isinstance(counted, Tensor):  # to read it would wait for the device
                    raise UserError(f"{name}: returned a Tensor, takes a function that returns a number the host knows")

    @never_raise
    def _count(self, timed: Batch, trainer: Trainer, batch: Any) -> None:
        """What a batch holds, and whether it trains."""
        timed.recorded |= skips_backward(trainer)
        timed.samples = self._samples_in(batch)
        if self.timesteps_fn is not None:
            timed.timesteps = self.timesteps_fn(batch)
        else:
            counted = getattr(trainer.train_dataloader, "timesteps", None)  # by our loader, without padding
            timed.timesteps = counted if isinstance(counted, int) else timed.samples * self._timesteps

    @override
    def begin_training(self) -> None:
        timed, updates = self._timer.current, self._timer.updates
        if timed is not None and self._recorded is not None:
            self._recorded.start(updates.count + 1, updates.step, timed)
            # Another callback or the user may record or trace it, too.
            timed.recorded |= self._recorded.active or self._kernel_time.active or any_mode() or is_profiler_active()

    @override
    def end_backward(self) -> None:
        self._exchanges.end_backward()

    @override
    def end_batch(self, trainer: Trainer) -> None:
        if self._timer.current is not None:
            self._kernel_time.stop(self._timer.current.samples)
        super().end_batch(trainer)
        if len(self._timer.finished) >= FLUSH_EVERY or len(self._windows.all) > self._windows_read:
            self.flush(trainer, wait=False)

    @override
    def stop_recording(self) -> None:
        if self._recorded is not None:
            self._recorded.stop()

    # --- marks become rows, and rows become curves --------------------------------------------------------------------

    @override
    def flush(self, trainer: Trainer, wait: bool = True) -> None:
        """Turn marks into rows of the table, and write these; without `wait` those that the device has reached."""
        with pause(trainer):
            self._windows_read = len(self._windows.all)
            clock, finished, batches = self._timer.clock, self._timer.finished, []
            if wait and finished:
                clock.wait(finished[-1].moments[-1])
            while finished and clock.ready(finished[0].moments[-1]):
                batches.append(finished.popleft())
            before = self.table.last_step
            rows = self.table.add([batch for batch in batches if batch.trained], clock)
            for batch in batches:
                clock.reuse(batch.moments[:-1])  # the last moment is the next batch's first
                clock.reuse(batch.waits)
            if self._flops is None and self._recorded is not None and self._recorded.is_over:
                self._flops = self._recorded.flops()
            is_written = (rows["flags"] & (FIRST | RECORDED | INVALID)) == 0
            steps = numpy.concatenate([[before], rows["step"]])
            is_due = passes(steps[:-1], steps[1:], self.every_n_steps) if self.every_n_steps else False
            rows = rows[is_written & is_due]
            if len(rows) and trainer.loggers:
                together, flops = replicas(trainer), self._flops or Flops()
                per_device = flops.per_sample and flops.per_sample * together / trainer.world_size
                peak = peak_of(flops, str(trainer.precision), self.calibration)
                self._writer.write(metrics_of(rows, together, per_device, peak, self.table.parts))


def _held_update(trainer: Trainer, module: LightningModule, recorded: RecordedUpdates, can_hold: bool) -> int:
    """The update in which the time of kernels is measured: after the recorded ones, and once CUDA graphs are captured.

    Of several ranks each would wait for those that are held; 0 for none.
    """
    if not (recorded.last and can_hold and trainer.world_size == 1):
        return 0
    return LAST_RECORDED + (4 if is_compiled_module(module) else 1)


def _nothing(why: str) -> dict[str, Any]:
    """A summary that only says why there is no verdict."""
    return {"missing": {"bottleneck": why}}
