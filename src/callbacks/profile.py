"""OperationProfiler: what each operation of a training step costs, in which module, and its lower bound."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from typing_extensions import override

from .._lightning import callbacks_of
from ..files import why, write_folder
from ..hardware.contention import Noise, cpu_seconds, noise_between, others_share
from ..hardware.devices import cache_bytes
from ..hardware.measure import find_calibration
from ..hardware.operations import OperationRecorder
from ..hardware.trace import MAX_BYTES, ProfilerUnavailableError, StepProfiler, compressed
from ..options.types import NonNegativeInt, PositiveInt
from ..records.explanation import FILE, TRACE, Explanation
from ..records.terminal import row, say
from ._batches import samples_in
from ._explanation import Measured, explain
from ._never_raise import never_raise
from ._operation_table import as_text
from ._recording import can_be_recorded, is_compiled_module
from ._update_stages import Stage, UpdateStages, most_updates, time_loader
from ._windows import TELLING_S
from .throughput import ThroughputMonitor


class OperationProfiler(Callback):
    """Takes some training steps apart, in any Lightning project, without touching the module.

    After a warm-up, it measures some steps as they are, notes the operations of some more, and records some with
    `torch.profiler`. The recorded steps take longer, so the profiler belongs into a run that is about speed. On a CPU an
    operation's time is that of its call. On a GPU it is that of its kernels; the host waits for the device four times in
    all. `explanation` has the result. Of several ranks the first one measures, and all end after the same update.

    Args:
        dirpath: a folder for `explain.json` and `trace.json.gz` (https://ui.perfetto.dev), written at once when both are
            known; a number is appended if the folder exists. None writes nothing.
        warmup_steps: updates that are left out; fewer, but 4, if they take more than 15 s.
        steps: updates that are measured as they are, and at most recorded with `torch.profiler`. None measures 10
            (fewer, but 5, if they take more than 3 s) and records 5.
        calibrate: whether the device's peaks may be measured (once, for some seconds; the result is cached). Without
            them there are no lower bounds.
        stop: end the training when all is known.
        verbose: print the tables when all is known.
    """

    observes_only = True

    def __init__(
        self,
        dirpath: str | None = None,
        warmup_steps: NonNegativeInt = 10,
        steps: PositiveInt | None = None,
        calibrate: bool = True,
        stop: bool = False,
        verbose: bool = True,
    ):
        self.dirpath = dirpath
        self.warmup_steps = warmup_steps
        self.steps = steps
        self.calibrate = calibrate
        self.stop = stop
        self.verbose = verbose
        self.explanation: Explanation | None = None
        self.files: dict[str, bytes] = {}  # the explanation and the trace, by name
        self.folder: Path | None = None  # that was written
        self._stages: UpdateStages | None = None
        self._open = contextlib.ExitStack()  # what a recorded batch has opened
        self._attached = contextlib.ExitStack()  # the hook that times the loader

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
        self._update, self._updates = trainer.global_step, 0
        if not trainer.is_global_zero:
            return
        self.explanation = self.folder = None
        self.files = {}
        self._device = trainer.strategy.root_device
        self._stages = UpdateStages(self.warmup_steps, self.steps, self._device)
        self._attached.enter_context(time_loader(trainer, self._stages))
        self._records = can_be_recorded(trainer) and not is_compiled_module(pl_module)
        self._recorder = OperationRecorder(pl_module, cache_bytes(self._device), lambda: self._part)
        self._profiler: StepProfiler | None = None
        self._trace: dict[str, Any] = {"traceEvents": []}
        self._batch_size: int | None = None
        self._notes: list[str] = []
        if not self._records:
            self._notes.append("the operations of compiled or sharded modules are not counted")
        self._part = "forward"
        self._in_update = False
        self._cpu_before = cpu_seconds()

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        stages = self._stages
        if stages is None:
            return
        if not self._in_update:
            self._in_update = True
            stages.begin(len(self._recorder.steps[-1]) if self._recorder.steps else 0)
            if stages.stage is Stage.DONE:
                self._finish(trainer, pl_module)
                return
            self._begin_update(stages)
        if stages.stage is Stage.RECORDED and self._records:
            # In manual optimisation the module may go on with another forward pass.
            after = "other" if pl_module.automatic_optimization else "forward"
            self._open.callback(register_optimizer_step_post_hook(lambda *_: self._set_part(after)).remove)
            self._open.enter_context(self._recorder)
        self._batch_size = self._batch_size or samples_in(batch)
        stages.begin_batch()
        self._part = "forward"

    def _begin_update(self, stages: UpdateStages) -> None:
        if stages.stage is Stage.RECORDED:
            self._recorder.next_step()
        elif stages.stage is Stage.PROFILED:
            if self._profiler is None:
                self._profiler = self._started_profiler(stages)
            if self._profiler is not None:
                self._profiler.begin_step()

    def _started_profiler(self, stages: UpdateStages) -> StepProfiler | None:
        try:
            profiler = StepProfiler(self._device)
            profiler.start()
        except ProfilerUnavailableError as error:
            self._notes.append(f"torch.profiler cannot be used, so there is no trace: {error}")
            stages.skip_profile()
            return None
        return profiler

    @override
    @never_raise
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._set_part("optimizer")

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._set_part("backward")

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._set_part("other")

    @override
    @never_raise
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._set_part("optimizer")

    def _set_part(self, part: str) -> None:
        self._part = part

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = trainer.global_step != self._update  # otherwise the gradients are kept for a later batch
        if is_last:
            self._update = trainer.global_step
            self._stop_together(trainer)
        stages = self._stages
        if stages is None:
            return
        self._part = "other"
        self._open.close()
        if is_last:
            self._in_update = False
            if stages.stage is Stage.PROFILED and self._profiler is not None:
                self._profiler.end_step()
        stages.end_batch(is_last)
        if is_last and stages.is_complete:
            self._finish(trainer, pl_module)

    def _stop_together(self, trainer: Trainer) -> None:
        """End the training of every rank after the last update that rank 0 may need; no rank knows what it does need."""
        self._updates += 1
        if self.stop and self._updates >= sum(most_updates(self.warmup_steps, self.steps).values()):
            trainer.should_stop = True

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out_interval()

    @override
    @never_raise
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out_interval()

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._leave_out_interval()

    def _leave_out_interval(self) -> None:
        """The time until the next update begins is not that of a step."""
        if self._stages is not None:
            self._stages.leave_out()

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.disable()

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.disable()

    def disable(self) -> None:
        """Measure no more in this fit."""
        if self._stages is None:
            return
        self._stages = None
        self._open.close()
        self._attached.close()
        if self._profiler is not None:
            self._profiler.stop()

    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        """Sum up what was measured."""
        stages = self._stages
        if stages is None:
            return
        try:
            self._trace = self._profiler.stop() if self._profiler else self._trace
        except ProfilerUnavailableError as error:
            self._notes.append(f"there is no trace: {error}")
        self.disable()
        if self.stop and trainer.world_size == 1:
            trainer.should_stop = True
        if not stages.intervals:
            rank_zero_warn(f"OperationProfiler has measured no step: it needs {self.warmup_steps + 2} updates")
            return
        load = cpu_seconds()
        measured = Measured(
            title=getattr(module, "title", type(module).__name__),
            device=self._device,
            precision=str(trainer.precision),
            batch_size=self._batch_size,
            **stages.facts(),
            recorder=self._recorder if self._records else None,
            events=self._trace["traceEvents"],
            calibration=self._calibration,
            others=others_share(self._cpu_before, load),
            noise=noise_between(self._cpu_before, load) if stages.elapsed() >= TELLING_S else Noise(),
            is_judged=trainer.world_size == 1
            and not any(isinstance(one, ThroughputMonitor) for one in callbacks_of(trainer)),
            notes=self._notes,
        )
        self._explain(measured)

    def _explain(self, measured: Measured) -> None:
        """Make the explanation; write it and print it if that is wanted."""
        data, measured.trace_steps = compressed(self._trace) if self._trace["traceEvents"] else (b"", 0)
        self._trace = {}
        if measured.events and not data:
            measured.notes.append(f"no trace is kept: one step takes more than {MAX_BYTES / 1e6:.0f} MB")
        self.explanation = explain(measured)
        text = json.dumps(self.explanation.to_dict(), indent=1)
        self.files = {FILE: text.encode(), **({TRACE: data} if data else {})}
        if self.dirpath is not None:
            try:
                self.folder = write_folder(Path(self.dirpath), self.files)
            except OSError as error:
                rank_zero_warn(f"OperationProfiler: {self.dirpath} cannot be written: {why(error)}")
        if self.verbose:
            say("\n" + as_text(self.explanation))
