"""Measurement: what measures one fit. Marks become rows of a table, rows become curves, and after the fit all becomes Measured."""

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
from lightning import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from .._lightning import callback_of, skips_backward
from .._torch import any_mode, is_profiler_active, watch_compilation
from ..distributed.gather import replicas
from ..hardware.bottleneck import CHANGED
from ..hardware.devices import device_name
from ..hardware.nvml_readings import POWER, UTILIZATION
from ..hardware.processor import root_of_run
from ..hardware.programs import ProgramWatch
from ..hardware.slow_rank import RankTimes
from ..hardware.telemetry import named
from ..records.rates import LOAD_SAID
from ..records.terminal import is_in_sweep
from ._batches import SampleCounter, timesteps_of
from ._communication import Exchanges
from ._cost import cost_of, median_step, metrics_of, own_times
from ._events import FitListener
from ._fit_time import FitTimer
from ._kernel_time import KernelTime
from ._level import spans_of
from ._measured import Measured
from ._never_raise import Refused
from ._recording import LAST_RECORDED, Flops, RecordedUpdates, is_compiled_module
from ._report import peak_of
from ._setting import setting_of, title_of
from ._table import FIRST, INVALID, RECORDED, UpdateTable
from ._timer import StepTimer, clock_for, pause
from ._updates import passes
from ._windows import Windows
from ._writer import StepWriter
from .device import DeviceMonitor

if TYPE_CHECKING:
    from .throughput import ThroughputMonitor

FLUSH_EVERY = 100  # batches read together
_OF_ALL_RUNS = {named(key, "mean") for key in (UTILIZATION, POWER)}  # on a device that runs share


class Measurement(FitListener):
    """Measures the fit that begins, until `stop`.

    Args:
        monitor: whose options and calibration count.
        trainer, module: of the fit.

    Attributes:
        table: the updates so far.
        windows: into which its rows fall.
        recorded: the updates whose operations are recorded.
        cost: of a step, by this rank, once the fit is over; empty where no step counts.
        own_times: of this rank, once the fit is over; None where no step counts.
        programs: that took most of the processor. Nothing but the terminal has their names.
        ended: why a timed run has ended.
        traced_s: for how long kernels ran in a step, by a trace.
        is_visited: whether the run has waited between windows.
    """

    def __init__(self, monitor: "ThroughputMonitor", trainer: Trainer, module: LightningModule):
        timer = StepTimer(clock_for(trainer.strategy.root_device), trainer.global_step)
        super().__init__(timer, FitTimer(monitor.began))
        self._monitor = monitor
        self._samples_in = monitor.batch_size_fn or SampleCounter(trainer.train_dataloader)
        self._timesteps = timesteps_of(module)  # asked for once: a network has to look for it in all its parts
        self.cost: dict[str, Any] = {}
        self.own_times: RankTimes | None = None
        self.ended: str | None = None
        self.traced_s: float | None = None
        self.programs = ""
        self.is_visited = False
        # A sweep watches for its runs, whose output goes to a file.
        is_alone = trainer.is_global_zero and not is_in_sweep()
        self._watch = ProgramWatch([root_of_run()]) if is_alone else None
        if self._watch is not None:
            self._watch.sample()
        given = monitor.flops_per_sample
        self._flops = None if given is None else Flops(given, is_given=True)
        self.recorded = RecordedUpdates(trainer, module, monitor.record_operations, lambda: timer.part)
        held = _held_update(trainer, module, self.recorded, timer.clock.can_hold)
        self._kernel_time = KernelTime(timer.clock, held)
        first, device = max(1, monitor.warmup_steps, self.recorded.last, held), trainer.strategy.root_device.type
        self.windows, self._windows_read = Windows(first, device=device), 0
        self.table = UpdateTable(first, self.windows, trainer.global_step, timer.clock.parts)
        self._writer = StepWriter(trainer)
        self._attached = contextlib.ExitStack()
        self._counted_since = time.perf_counter()

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Attach what hears of the fit besides Lightning's events."""
        self._attached.callback(self.recorded.stop)
        self._exchanges = Exchanges(trainer, self.timer)
        self._attached.callback(self._exchanges.stop)
        if is_compiled_module(module):  # what torch.compile takes is in no step, also where it compiles again
            self._attached.callback(watch_compilation(lambda: pause(trainer)))

    def stop(self) -> None:
        """Measure no more."""
        self.timer.current = None
        self._attached.close()

    # --- a batch ------------------------------------------------------------------------------------------------------

    @override
    def begin_batch(self) -> None:
        self.stop_recording()
        updates = self.timer.updates
        if updates.count <= self.windows.first:
            self._counted_since = time.perf_counter()
        if updates.is_between and self.windows.is_due(updates.count):
            with self.timer.pause():  # what a window's border costs is in no step
                self.windows.begin(updates.count)
        super().begin_batch()
        self._kernel_time.start(updates.count + 1)

    @override
    def count_batch(self, trainer: Trainer, batch: Any) -> None:
        timed = self.timer.current
        if timed is None:
            return
        timed.recorded |= skips_backward(trainer)
        timed.samples = self._samples_in(batch)
        if self._monitor.timesteps_fn is not None:
            timed.timesteps = self._monitor.timesteps_fn(batch)
        else:
            counted = getattr(trainer.train_dataloader, "timesteps", None)  # by our loader, without padding
            timed.timesteps = counted if isinstance(counted, int) else timed.samples * self._timesteps
        self.recorded.expect(batch)
        for name, counted in (("batch_size_fn", timed.samples), ("timesteps_fn", timed.timesteps)):
            if isinstance(counted, Tensor):  # to read it would wait for the device
                raise Refused(f"{name}: returned a Tensor, takes a function that returns a number the host knows")

    @override
    def begin_training(self) -> None:
        timed, updates = self.timer.current, self.timer.updates
        if timed is not None:
            self.recorded.start(updates.count + 1, updates.step, timed)
            # Another callback or the user may record or trace it, too.
            timed.recorded |= self.recorded.active or self._kernel_time.active or any_mode() or is_profiler_active()

    @override
    def end_backward(self) -> None:
        self._exchanges.end_backward()

    @override
    def end_batch(self, trainer: Trainer) -> None:
        if self.timer.current is not None:
            self._kernel_time.stop(self.timer.current.samples)
        super().end_batch(trainer)
        if len(self.timer.finished) >= FLUSH_EVERY or len(self.windows.all) > self._windows_read:
            self.flush(trainer, wait=False)

    @override
    def stop_recording(self) -> None:
        self.recorded.stop()

    # --- marks become rows, and rows become curves --------------------------------------------------------------------

    @override
    def flush(self, trainer: Trainer, wait: bool = True) -> None:
        """Turn marks into rows of the table, and write these; without `wait` those that the device has reached."""
        with pause(trainer):
            self._windows_read = len(self.windows.all)
            clock, finished, batches = self.timer.clock, self.timer.finished, []
            if wait and finished:
                clock.wait(finished[-1].moments[-1])
            while finished and clock.ready(finished[0].moments[-1]):
                batches.append(finished.popleft())
            before = self.table.last_step
            rows = self.table.add([batch for batch in batches if batch.trained], clock)
            for batch in batches:
                clock.reuse(batch.moments[:-1])  # the last moment is the next batch's first
                clock.reuse(batch.waits)
            if self._flops is None and self.recorded.is_over:
                self._flops = self.recorded.flops()
            is_written = (rows["flags"] & (FIRST | RECORDED | INVALID)) == 0
            steps = numpy.concatenate([[before], rows["step"]])
            interval = self._monitor.every_n_steps
            is_due = passes(steps[:-1], steps[1:], interval) if interval else False
            rows = rows[is_written & is_due]
            if len(rows) and trainer.loggers:
                together, flops = replicas(trainer), self._flops or Flops()
                per_device = flops.per_sample and flops.per_sample * together / trainer.world_size
                peak = peak_of(flops, str(trainer.precision), self._monitor.calibration)
                self._writer.write(metrics_of(rows, together, per_device, peak, self.table.parts))

    # --- the end of the fit -------------------------------------------------------------------------------------------

    def finish(self, trainer: Trainer, wait: bool = True) -> None:
        """Read what is left, with `wait` after waiting for the device, and stop."""
        self.stop_recording()
        if self.timer.updates.count:
            self.recorded.measure_memory()
        self.timer.end_step()
        self.windows.end(self.timer.updates.count)
        self.flush(trainer, wait)
        self.stop()
        if cost := cost_of(self.table, replicas(trainer)):
            windows = self.windows.facts()
            self.cost = cost | windows | ({"ended": self.ended} if self.ended else {})
            share = windows.get("others_share", 0.0)
            if self._watch is not None and share >= LOAD_SAID:
                self._watch.sample()
                self.programs = self._watch.most_of(share)
            self.own_times = own_times(self.table)

    def result(self, trainer: Trainer, module: LightningModule, ranks: Sequence[RankTimes]) -> Measured:
        """What the fit has measured, given the own times of every rank; there has to be a cost."""
        cost, recorded, device = self.cost, self.recorded, trainer.strategy.root_device
        changed, kernel_s = self.table.changed(cost["work_ms_median"]), self.traced_s
        others = "the updates hold another number of batches than the recorded ones"
        not_recorded = recorded.why_no_operations or (others if self.table.has_other_batches() else None)
        is_whole = self._kernel_time.samples == self.table.whole_batch()
        if kernel_s is None and is_whole and 1 / CHANGED <= changed <= CHANGED:
            kernel_s = self._kernel_time.seconds
        monitor = callback_of(trainer, DeviceMonitor) or DeviceMonitor()
        sampled = monitor.result(self._counted_since)
        if self.windows.in_passes:  # the driver's means are of a time in which other runs were visited
            sampled = {key: value for key, value in sampled.items() if key not in _OF_ALL_RUNS}
        return Measured(
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
            spans=spans_of(self.table, monitor.readings, self.fit_time.validations),
            fit_time={} if self.is_visited else self.fit_time.result(trainer, self.table.total_s()),
        )

    def why_nothing_is_known(self) -> str:
        """Why no step counts."""
        updates = self.timer.updates.count
        if not updates and self.timer.updates.step:
            return "all steps were trained before the run was resumed"
        if not updates:
            return (
                "Lightning has counted no optimizer step: no batch was trained, or a module that optimises by hand does "
                "not step the optimizers of self.optimizers()"
            )
        if updates <= self.windows.first:
            return f"of {updates} updates none came after the warm-up of {self.windows.first}"
        return (
            "no step counts: each was profiled or recorded, the clock has jumped, or another rank has stopped measuring"
        )


def _held_update(trainer: Trainer, module: LightningModule, recorded: RecordedUpdates, can_hold: bool) -> int:
    """The update in which the time of kernels is measured: after the recorded ones, and once CUDA graphs are captured.

    Of several ranks each would wait for those that are held; 0 for none.
    """
    if not (recorded.last and can_hold and trainer.world_size == 1):
        return 0
    return LAST_RECORDED + (4 if is_compiled_module(module) else 1)
