"""OperationProfiler: the time of each operation of a training step, its module, and its lower bound.

It builds on ThroughputMonitor, which times the updates, records the operations of the first ones, and finds what limits the
step. After `steps` timed updates it traces a few with torch.profiler.
"""

import gzip
import json
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from .._lightning import callbacks_of
from ..errors import UserError
from ..hardware.trace import WARMUP, StepProfiler, busy_us, step_starts
from ..options.types import PositiveInt
from ..records.explanation import FILE, TRACE, Explanation
from ..records.terminal import say
from ._explanation import explain, explanation_text
from ._never_raise import never_raise
from ._recording import LAST_RECORDED
from ._timer import pause
from ._updates import Updates
from .throughput import ThroughputMonitor

TRACED = 3  # updates


class OperationProfiler(Callback):
    """Takes training steps apart, in any Lightning project, without touching the module.

    It stands behind a ThroughputMonitor, whose timed steps, recorded operations and verdict it explains, and traces 3
    updates with `torch.profiler`. Traced updates take longer, and no rate includes them. On a CPU an operation's time is
    that of its call, and on CUDA that of its kernels; on MPS operations are only counted. After the fit `explanation` has
    the result, and `files` the contents of `explain.json` and `trace.json.gz` (https://ui.perfetto.dev). With several ranks
    only rank 0 traces and explains.

    Args:
        steps: updates after the monitor's warm-up that are timed before the trace.
        stop: end the training after the trace.
        verbose: print the tables when training ends.

    Raises:
        UserError: without a ThroughputMonitor before it.
    """

    observes_only = True

    def __init__(self, steps: PositiveInt = 10, stop: bool = False, verbose: bool = True):
        self.steps = steps
        self.stop = stop
        self.verbose = verbose
        self.explanation: Explanation | None = None
        self.files: dict[str, bytes] = {}  # the explanation and the trace, by name
        self._profiler: StepProfiler | None = None  # None before a fit, and once its trace has ended
        self._trace: dict[str, Any] = {}
        self._error: str | None = None  # why there is no trace

    def updates(self, monitor: ThroughputMonitor) -> int:
        """Return the number of updates of a fit until the end of the trace."""
        return self._traced_after(monitor) + WARMUP + TRACED

    def _traced_after(self, monitor: ThroughputMonitor) -> int:
        return max(LAST_RECORDED, monitor.warmup_steps, monitor.first_counted) + self.steps

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks = callbacks_of(trainer)
        monitors = [item for item in callbacks[: callbacks.index(self)] if isinstance(item, ThroughputMonitor)]
        if not monitors:
            raise UserError("OperationProfiler: needs a ThroughputMonitor before it among the callbacks")
        self._monitor = monitors[0]

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._updates = Updates(trainer.global_step)
        self.explanation, self.files = None, {}
        self._trace, self._error = {"traceEvents": []}, "the training ended before it"
        self._profiler = StepProfiler(trainer.strategy.root_device, TRACED) if trainer.is_global_zero else None

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        first_traced = self._traced_after(self._monitor)
        if first_traced <= self._updates.count < self.updates(self._monitor):
            if self._profiler is not None and self._updates.count == first_traced and self._updates.is_between:
                self._profiler.start()
            self._monitor.exclude_update()  # the update is slower on every rank, also in the warm-up of the trace

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._updates.end_batch(trainer.global_step):  # the gradients are accumulated
            return
        if self._profiler is not None:
            self._profiler.step()
        if self._updates.count == self.updates(self._monitor):
            trainer.should_stop |= self.stop  # on every rank, after the same update
            with pause(trainer):
                self._end_trace()

    def _end_trace(self) -> None:
        """Read the trace, and set the monitor's kernel time."""
        profiler = self._profiler
        self.disable()
        if profiler is None:
            return
        self._trace = profiler.trace()
        self._error = profiler.error
        events = self._trace["traceEvents"]
        if (busy := busy_us(events)) is not None and (steps := len(step_starts(events))):
            self._monitor.set_kernel_time(busy / 1e6 / steps)

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.disable()
        if not trainer.is_global_zero:
            return
        monitor = self._monitor
        if monitor.measured is None or "title" not in monitor.summary:
            rank_zero_warn(f"OperationProfiler explains no step: {monitor.summary['missing']['bottleneck']}")
            return
        notes = [f"there is no trace: {self._error}"] if self._error else []
        bottleneck, recorded = monitor.summary.get("bottleneck"), monitor.recorded_step()
        events = self._trace["traceEvents"]
        self.explanation = explain(monitor.measured, monitor.calibration, bottleneck, recorded, events, notes)
        self.files = {FILE: json.dumps(self.explanation.to_dict(), indent=1).encode()}
        if self.explanation.trace_steps:
            self.files[TRACE] = gzip.compress(json.dumps(self._trace).encode(), compresslevel=6)
        if self.verbose:
            say("\n" + explanation_text(self.explanation))

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.world_size > 1:  # the end of a trace waits for the device, and a collective may never end
            self._profiler = None
        self.disable()

    def disable(self) -> None:
        """End the trace, if one is running."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
