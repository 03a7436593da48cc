"""OperationProfiler: what each operation of a training step costs, in which module, and its lower bound.

A profiling schedule says what is done with each update of the weights:

    warm-up │ timed as they are │ operations recorded │ traced by torch.profiler
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from .._lightning import callbacks_of
from ..files import why, write_folder
from ..hardware.measure import find_calibration
from ..hardware.trace import WARMUP, StepProfiler
from ..options.types import NonNegativeInt, PositiveInt
from ..records.explanation import FILE, TRACE, Explanation
from ..records.terminal import row, say
from ._explanation import Measured, explain
from ._never_raise import never_raise
from ._operation_table import explanation_text
from ._recording import FIRST, LAST, RecordedUpdates, is_compiled_module
from ._step_monitor import StepMonitor
from ._timer import pause
from .throughput import ThroughputMonitor

TRACED = 3  # updates
_COMPILED = "the operations of a compiled module are not counted"


class OperationProfiler(StepMonitor):
    """Takes some training steps apart, in any Lightning project, without touching the module.

    After a warm-up, it times some updates as they are, counts the operations of 3 more, and traces 3 with
    `torch.profiler`. Recorded and traced updates take longer, so the profiler belongs into a run that is about speed. On
    a CPU an operation's time is that of its call. On CUDA it is that of its kernels; on MPS operations are only counted.
    `explanation` has the result. Of several ranks the first one traces and explains, and all end after the same update.

    Args:
        dirpath: a folder for `explain.json` and `trace.json.gz` (https://ui.perfetto.dev), written at once when both are
            known; a number is appended if the folder exists. None writes nothing.
        warmup_steps: updates that are left out; at least the first one is.
        steps: updates that are timed as they are.
        calibrate: whether the device's peaks may be measured (once, for some seconds; the result is cached). Without
            them there are no lower bounds.
        stop: end the training when all is known.
        verbose: print the tables when all is known.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        warmup_steps: NonNegativeInt = 10,
        steps: PositiveInt = 10,
        calibrate: bool = True,
        stop: bool = False,
        verbose: bool = True,
    ):
        super().__init__(max(1, warmup_steps))
        self.dirpath = dirpath
        self.steps = steps
        self.calibrate = calibrate
        self.stop = stop
        self.verbose = verbose
        self.explanation: Explanation | None = None
        self.files: dict[str, bytes] = {}  # the explanation and the trace, by name
        self.folder: Path | None = None  # that was written
        self._traced_from = self.warmup_steps + steps + LAST - FIRST + 1  # updates before the trace
        self._profiler: StepProfiler | None = None

    @property
    def updates(self) -> int:
        """How many updates the schedule takes."""
        return self._traced_from + WARMUP + TRACED

    def summary_lines(self) -> list[str]:
        """For the end of a run: where the explanation is."""
        return [row("explain", os.path.relpath(self.folder))] if self.folder else []

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            self._calibration = find_calibration(trainer.strategy.root_device, self.calibrate)

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step, self._done = trainer.global_step, 0
        self._is_compiled = is_compiled_module(pl_module)
        self.explanation = self.folder = None
        self.files = {}
        self._profiler = StepProfiler(trainer.strategy.root_device, TRACED) if trainer.is_global_zero else None
        recorded = RecordedUpdates(not self._is_compiled, first=self.warmup_steps + self.steps + 1)
        self._begin_fit(trainer, pl_module, recorded)

    @override
    def _record(self) -> None:
        super()._record()
        assert self.recorded is not None
        is_traced = self.timer.updates >= self._traced_from
        if self.timer.current is not None:  # steps beside a profiler of the user's are timed all the same
            self.timer.current.recorded = self.recorded.active or is_traced
        begins = self.timer.updates == self._traced_from and self.timer.is_between_updates
        if self._profiler is not None and begins:
            self._profiler.start()

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        is_update = trainer.global_step != self._global_step  # otherwise the gradients are kept for a later batch
        self._global_step = trainer.global_step
        self._done += is_update
        if is_update and self._profiler is not None:
            self._profiler.step()
        if self._done >= self.updates:
            self._finish(trainer, pl_module)
            trainer.should_stop |= self.stop  # of every rank, after the same update

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.world_size > 1:  # the end of a trace waits for the device, and a collective may never end
            self._profiler = None
        self.teardown(trainer, pl_module, "fit")

    @override
    def disable(self) -> None:
        super().disable()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    @never_raise
    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        """Explain what was measured; write it and print it if that is wanted."""
        if self._active:
            profiler = self._profiler
            with pause(trainer):  # of whoever else times the steps
                self._end_fit(trainer)
                self.disable()  # ends the trace
                if profiler is not None:
                    self._explain(trainer, module, profiler)

    def _explain(self, trainer: Trainer, module: LightningModule, profiler: StepProfiler) -> None:
        if not self.table.in_median().any():
            rank_zero_warn(f"OperationProfiler has measured no step: it needs {self.warmup_steps + 1} updates")
            return
        assert self.recorded is not None
        trace, reason = profiler.trace(), self.recorded.reason
        notes = [_COMPILED if self._is_compiled else reason and f"the operations could not be counted: {reason}"]
        notes += [profiler.error and f"there is no trace: {profiler.error}"]
        self.explanation = explain(
            Measured(
                title=getattr(module, "title", type(module).__name__),
                device=trainer.strategy.root_device,
                precision=str(trainer.precision),
                table=self.table,
                recorder=None if reason else self.recorded.recorder,
                not_recorded=reason,
                events=trace["traceEvents"],
                calibration=self._calibration,
                is_judged=trainer.world_size == 1
                and not any(isinstance(one, ThroughputMonitor) for one in callbacks_of(trainer)),
                notes=[note for note in notes if note],
            )
        )
        self.files = {FILE: json.dumps(self.explanation.to_dict(), indent=1).encode()}
        if self.explanation.trace_steps:
            self.files[TRACE] = gzip.compress(json.dumps(trace).encode(), compresslevel=6)
        if self.dirpath is not None:
            try:
                self.folder = write_folder(Path(self.dirpath), self.files)
            except OSError as error:
                rank_zero_warn(f"OperationProfiler: {self.dirpath} cannot be written: {why(error)}")
        if self.verbose:
            say("\n" + explanation_text(self.explanation))
