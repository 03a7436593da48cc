"""Measurement: measures one fit. Marks become rows of a table, rows become curves, and after the fit Measured holds the results."""

import contextlib
import time
from collections.abc import Callable, Sequence
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy
from lightning import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from .._lightning import callback_of, skips_backward
from .._torch import is_dispatch_mode_active, is_profiler_active, watch_compilation
from ..distributed.gather import replica_count
from ..hardware.bottleneck import CHANGED
from ..hardware.devices import device_name
from ..hardware.nvml_readings import POWER, UTILIZATION
from ..hardware.processor import root_of_run
from ..hardware.programs import ProgramWatch
from ..hardware.slow_rank import RankTimes
from ..hardware.telemetry import with_statistic
from ..records.rates import REPORTED_LOAD
from ..records.terminal import is_in_sweep
from ._batches import SampleCounter, timesteps_per_sample
from ._communication import Exchanges
from ._cost import compute_cost, compute_metrics, median_step, rank_times
from ._events import FitListener
from ._fit_time import FitTimer
from ._kernel_time import KernelTime
from ._level import find_spans
from ._measured import Measured
from ._never_raise import ArgumentError
from ._recording import LAST_RECORDED, Flops, RecordedUpdates, is_compiled_module
from ._report import measured_peak
from ._setting import read_setting, read_title
from ._table import FIRST, INVALID, RECORDED, UpdateTable
from ._timer import StepTimer, clock_for, pause
from ._updates import crosses_multiple
from ._windows import Windows
from ._writer import StepWriter
from .device import DeviceMonitor

if TYPE_CHECKING:
    from .throughput import ThroughputMonitor

FLUSH_EVERY = 100  # batches whose marks are read together
_DEVICE_WIDE_KEYS = {with_statistic(key, "mean") for key in (UTILIZATION, POWER)}  # of all runs that share a device


class Measurement(FitListener):
    """Measures a fit from its start until `stop`.

    Args:
        monitor: has the options and the calibration.
        trainer, module: of the fit.

    Attributes:
        table: the updates so far.
        windows: the windows of time into which the table's rows fall.
        recorded_updates: the updates whose operations are recorded.
        cost: the cost of a step on this rank, once the fit is over; empty where no step counts.
        rank_times: this rank's own times, once the fit is over; None where no step counts.
        programs: the names of the programs that took most of the processor, for the terminal only.
        end_reason: why a timed run has ended.
        traced_s: the seconds of a step in which kernels ran, as read from a trace.
        is_visited: whether the run has waited between windows.
        batch_samples: the samples of the batch that was counted last.
    """

    def __init__(self, monitor: "ThroughputMonitor", trainer: Trainer, module: LightningModule):
        timer = StepTimer(clock_for(trainer.strategy.root_device), trainer.global_step)
        super().__init__(timer, FitTimer(monitor.began))
        self._monitor = monitor
        self._samples_in = _checked(monitor.batch_size_fn, "batch_size_fn") or SampleCounter(trainer.train_dataloader)
        self._timesteps_in = _checked(monitor.timesteps_fn, "timesteps_fn")
        self._timesteps_per_sample = timesteps_per_sample(module)  # once: attribute access is slow in an nn.Module
        self.cost: dict[str, Any] = {}
        self.rank_times: RankTimes | None = None
        self.end_reason: str | None = None
        self.traced_s: float | None = None
        self.programs = ""
        self.is_visited = False
        self.batch_samples = 0
        # A run in a sweep prints to a file, so the sweep watches the programs instead.
        is_watching = trainer.is_global_zero and not is_in_sweep()
        self._program_watch = ProgramWatch([root_of_run()]) if is_watching else None
        if self._program_watch is not None:
            self._program_watch.sample()
        flops_per_sample = monitor.flops_per_sample
        self._flops = None if flops_per_sample is None else Flops(flops_per_sample, is_given=True)
        self.recorded_updates = RecordedUpdates(trainer, module, monitor.record_operations, lambda: timer.part)
        held_update = _choose_held_update(trainer, module, self.recorded_updates, timer.clock.can_hold)
        self._kernel_time = KernelTime(timer.clock, held_update)
        warmup = max(1, monitor.warmup_steps, self.recorded_updates.last_update, held_update)
        self.windows, self._num_windows_read = Windows(warmup, device=trainer.strategy.root_device.type), 0
        self.table = UpdateTable(warmup, self.windows, trainer.global_step, timer.clock.parts)
        self._writer = StepWriter(trainer)
        self._attachments = contextlib.ExitStack()
        self._counting_start = time.perf_counter()

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Attach the hooks that Lightning's events do not cover: gradient exchanges and compilation."""
        self._attachments.callback(self.recorded_updates.stop)
        self._exchanges = Exchanges(trainer, self.timer)
        self._attachments.callback(self._exchanges.stop)
        if is_compiled_module(module):  # exclude compilation from the step, also recompilation
            self._attachments.callback(watch_compilation(lambda: pause(trainer)))

    def stop(self) -> None:
        """Stop measuring."""
        self.timer.current = None
        self._attachments.close()

    # --- a batch ------------------------------------------------------------------------------------------------------

    @override
    def begin_batch(self) -> None:
        self.stop_recording()
        updates = self.timer.updates
        if updates.count <= self.windows.first_update:
            self._counting_start = time.perf_counter()
        if updates.is_between and self.windows.is_due(updates.count):
            with self.timer.pause():  # exclude the cost of a window's border from the step
                self.windows.begin(updates.count)
        super().begin_batch()
        self._kernel_time.start(updates.count + 1)

    @override
    def count_batch(self, trainer: Trainer, batch: Any) -> None:
        current = self.timer.current
        if current is None:
            return
        current.is_recorded |= skips_backward(trainer)
        current.samples = self.batch_samples = self._samples_in(batch)
        if self._timesteps_in is not None:
            current.timesteps = self._timesteps_in(batch)
        else:
            timesteps = getattr(trainer.train_dataloader, "timesteps", None)  # of our loader, without padding
            current.timesteps = (
                timesteps if isinstance(timesteps, int) else current.samples * self._timesteps_per_sample
            )
        self.recorded_updates.expect(batch)

    @override
    def begin_training(self) -> None:
        current, updates = self.timer.current, self.timer.updates
        if current is not None:
            self.recorded_updates.start(updates.count + 1, updates.step, current)
            current.is_recorded |= self.recorded_updates.is_active or self._kernel_time.is_active
            current.is_recorded |= is_dispatch_mode_active() or is_profiler_active()  # by another callback or the user

    @override
    def end_backward(self) -> None:
        self._exchanges.end_backward()

    @override
    def end_batch(self, trainer: Trainer) -> None:
        if self.timer.current is not None:
            self._kernel_time.stop(self.timer.current.samples)
        super().end_batch(trainer)
        if len(self.timer.finished) >= FLUSH_EVERY or len(self.windows.all) > self._num_windows_read:
            self.flush(trainer, wait=False)

    @override
    def stop_recording(self) -> None:
        self.recorded_updates.stop()

    # --- marks become rows, and rows become curves --------------------------------------------------------------------

    @override
    def flush(self, trainer: Trainer, wait: bool = True) -> None:
        """Turn marks into rows of the table, and write the rows; without `wait` only marks that the device has reached."""
        with pause(trainer):
            self._num_windows_read = len(self.windows.all)
            clock, finished, batches = self.timer.clock, self.timer.finished, []
            if wait and finished:
                clock.wait(finished[-1].moments[-1])
            while finished and clock.ready(finished[0].moments[-1]):
                batches.append(finished.popleft())
            step_before = self.table.last_step
            rows = self.table.add([batch for batch in batches if batch.is_trained], clock)
            for batch in batches:
                clock.reuse(batch.moments[:-1])  # the last moment is the next batch's first
                clock.reuse(batch.waits)
            if self._flops is None and self.recorded_updates.is_over:
                self._flops = self.recorded_updates.flops()
            is_written = (rows["flags"] & (FIRST | RECORDED | INVALID)) == 0
            steps = numpy.concatenate([[step_before], rows["step"]])
            interval = self._monitor.every_n_steps
            is_due = crosses_multiple(steps[:-1], steps[1:], interval) if interval else False
            rows = rows[is_written & is_due]
            if len(rows) and trainer.loggers:
                num_replicas, flops = replica_count(trainer), self._flops or Flops()
                flops_per_rank = flops.per_sample and flops.per_sample * num_replicas / trainer.world_size
                peak = measured_peak(flops, str(trainer.precision), self._monitor.calibration)
                self._writer.write(compute_metrics(rows, num_replicas, flops_per_rank, peak, self.table.parts))

    # --- the end of the fit -------------------------------------------------------------------------------------------

    def finish(self, trainer: Trainer, wait: bool = True) -> None:
        """Read the remaining marks, with `wait` after waiting for the device, and stop."""
        self.stop_recording()
        if self.timer.updates.count:
            self.recorded_updates.measure_memory()
        self.timer.end_step()
        self.windows.end(self.timer.updates.count)
        self.flush(trainer, wait)
        self.stop()
        if cost := compute_cost(self.table, replica_count(trainer)):
            windows = self.windows.summarize()
            self.cost = cost | windows | ({"ended": self.end_reason} if self.end_reason else {})
            share = windows.get("others_share", 0.0)
            if self._program_watch is not None and share >= REPORTED_LOAD:
                self._program_watch.sample()
                self.programs = self._program_watch.most_of(share)
            self.rank_times = rank_times(self.table)

    def result(self, trainer: Trainer, module: LightningModule, ranks: Sequence[RankTimes]) -> Measured:
        """Return the results of the fit, given the times of every rank; `cost` must not be empty."""
        cost, recorded_updates, device = self.cost, self.recorded_updates, trainer.strategy.root_device
        drift, kernel_s = self.table.drift_since_recording(cost["work_ms_median"]), self.traced_s
        not_recorded = recorded_updates.why_no_operations
        if not_recorded is None and self.table.has_other_accumulation():
            not_recorded = "the updates hold another number of batches than the recorded ones"
        is_whole_batch = self._kernel_time.samples == self.table.whole_batch_size()
        if kernel_s is None and is_whole_batch and 1 / CHANGED <= drift <= CHANGED:
            kernel_s = self._kernel_time.seconds
        monitor = callback_of(trainer, DeviceMonitor) or DeviceMonitor()
        sampled = monitor.result(self._counting_start)
        if self.windows.in_passes:  # the driver's means include the visits of other runs
            sampled = {key: value for key, value in sampled.items() if key not in _DEVICE_WIDE_KEYS}
        return Measured(
            title=read_title(module),
            device=device.type,
            device_name=device_name(device),
            precision=str(trainer.precision),
            cost=cost,
            setting=read_setting(trainer, cost["batch_size"]),
            ranks=ranks,
            sampled=sampled,
            operations=() if not_recorded else recorded_updates.operations(),
            not_recorded=not_recorded,
            batch_bytes=recorded_updates.batch_bytes,
            flops=self._flops or Flops(),
            changed=drift,
            median_parts_ms=median_step(self.table),
            median_steps=int(self.table.in_median().sum()),
            kernel_s=kernel_s,
            spans=find_spans(self.table, monitor.readings, self.fit_time.validations),
            fit_time={} if self.is_visited else self.fit_time.result(trainer, self.table.total_s()),
        )

    def why_no_step_counts(self) -> str:
        """Return the reason why no step counts."""
        updates = self.timer.updates.count
        if not updates and self.timer.updates.step:
            return "all steps were trained before the run was resumed"
        if not updates:
            return (
                "Lightning has counted no optimizer step: no batch was trained, or a module that optimises by hand does "
                "not step the optimizers of self.optimizers()"
            )
        if updates <= self.windows.first_update:
            return f"of {updates} updates none came after the warm-up of {self.windows.first_update}"
        return (
            "no step counts: each was profiled or recorded, the clock has jumped, or another rank has stopped measuring"
        )


def _checked(function: Callable[[Any], Any] | None, name: str) -> Callable[[Any], Any] | None:
    """Return a user's function that counts in a batch, with ArgumentError for what is no count; None without a function."""
    if function is None:
        return None

    def count(batch: Any) -> Any:
        number = function(batch)
        if not isinstance(number, Real) or not 0 <= float(number) < inf:  # to read a Tensor would wait for the device
            returned = "a Tensor" if isinstance(number, Tensor) else repr(number)
            raise ArgumentError(f"{name}: returned {returned}, takes a function that returns a number the host knows")
        return number

    return count


def _choose_held_update(trainer: Trainer, module: LightningModule, recording: RecordedUpdates, can_hold: bool) -> int:
    """Return the update in which kernel time is measured: after the recorded ones, and once CUDA graphs are captured.

    Return 0, for none, with several ranks: each would wait for the held device of another.
    """
    if not (recording.last_update and can_hold and trainer.world_size == 1):
        return 0
    return LAST_RECORDED + (4 if is_compiled_module(module) else 1)
