"""OperationProfiler: what each operation of a training step costs, in which module, and its lower bound.

A profiling schedule gives each update of the weights its stage:

    warm-up │ plain: timed as they are │ recorded: operations are counted │ traced by torch.profiler
"""

import contextlib
import gzip
import json
import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from typing_extensions import override

from .._lightning import callbacks_of
from ..files import why, write_folder
from ..hardware.contention import Noise, cpu_seconds, is_disturbed, noise_between
from ..hardware.devices import cache_bytes
from ..hardware.measure import find_calibration
from ..hardware.operations import OperationRecorder
from ..hardware.trace import WARMUP, StepProfiler
from ..options.types import NonNegativeInt, PositiveInt
from ..records.explanation import FILE, TRACE, Explanation
from ..records.terminal import row, say
from ._batches import samples_in
from ._explanation import Measured, explain
from ._never_raise import never_raise
from ._operation_table import as_text
from ._profiler_hook import attach_profiler_hook, detach_profiler_hook
from ._recording import can_be_recorded, is_compiled_module
from ._timer import pause
from ._windows import TELLING_S
from .throughput import ThroughputMonitor

RECORDED, TRACED = 3, 3  # updates
_PART_OF_ACTION = {"train_dataloader_next": "data_wait", "batch_to_device": "transfer"}  # of Lightning's profiler


class Stage(IntEnum):
    """What is done with an update."""

    WARMUP = 0
    PLAIN = 1
    RECORDED = 2
    TRACED = 3


class OperationProfiler(Callback):
    """Takes some training steps apart, in any Lightning project, without touching the module.

    After a warm-up, it times some updates as they are, counts the operations of 3 more, and traces 3 with
    `torch.profiler`. Recorded and traced updates take longer, so the profiler belongs into a run that is about speed. On
    a CPU an operation's time is that of its call. On CUDA it is that of its kernels; on MPS operations are only counted.
    The host waits for the device at the ends of the timed updates and of the trace, and where training pauses between
    them. `explanation` has the result. Of several ranks the first one measures, and all end after the same update.

    Args:
        dirpath: a folder for `explain.json` and `trace.json.gz` (https://ui.perfetto.dev), written at once when both are
            known; a number is appended if the folder exists. None writes nothing.
        warmup_steps: updates that are left out.
        steps: updates that are timed as they are.
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
        steps: PositiveInt = 10,
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
        self._ends = list(accumulate((warmup_steps, steps, RECORDED, WARMUP + TRACED)))  # of each stage, in updates
        self._active = False  # whether this rank measures
        self._open = contextlib.ExitStack()  # what a recorded batch has opened
        self._attached = contextlib.ExitStack()  # the hook that times the loader and the copy

    @property
    def updates(self) -> int:
        """How many updates all stages take."""
        return self._ends[-1]

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
        if not trainer.is_global_zero:
            return
        self.explanation = self.folder = None
        self.files = {}
        self._active, self._in_update, self._stage = True, False, Stage.WARMUP
        self._device = trainer.strategy.root_device
        self._timer = UpdateTimer()
        self._attached.enter_context(self._timer.attached(trainer))
        self._part = "forward"
        self._after = "other" if pl_module.automatic_optimization else "forward"  # which may run again in manual mode
        self._recorder = OperationRecorder(pl_module, cache_bytes(self._device), lambda: self._part)
        self._records = can_be_recorded(trainer) and not is_compiled_module(pl_module)
        self._profiler = StepProfiler(self._device, TRACED)
        self._batch_size: int | None = None
        self._notes = [] if self._records else ["the operations of compiled or sharded modules are not counted"]
        self._began, self._load = time.perf_counter(), cpu_seconds()

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._active:
            return
        begins = not self._in_update
        if begins:
            with pause(trainer):
                self._begin_stage()
            self._in_update = True
        self._timer.begin_batch(is_first=begins, is_timed=self._stage is Stage.PLAIN)
        if self._stage is Stage.RECORDED and self._records:
            if begins:
                self._recorder.next_step()
            self._open.callback(register_optimizer_step_post_hook(lambda *_: self._set_part(self._after)).remove)
            self._open.enter_context(self._recorder)
        self._batch_size = self._batch_size or samples_in(batch)
        self._part = "forward"

    def _begin_stage(self) -> None:
        """Take the next update's stage, and do what is done once between two stages."""
        before, self._stage = self._stage, Stage(bisect_right(self._ends, self._done))
        if before is self._stage:
            return
        if Stage.PLAIN in (before, self._stage):
            synchronize(self._device)
        if self._stage is Stage.TRACED:
            self._profiler.start()

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._set_part("backward")

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            self._set_part(self._after)

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
        is_update = trainer.global_step != self._global_step  # otherwise the gradients are kept for a later batch
        self._global_step = trainer.global_step
        self._done += is_update
        if self._active:
            self._part = "other"
            self._open.close()
            self._timer.mark("batch")
            self._in_update = not is_update
            if is_update:
                self._profiler.step()
        if self._done >= self.updates:
            with pause(trainer):  # of whoever times the steps, too
                self._finish(trainer, pl_module)
            trainer.should_stop |= self.stop  # of every rank, after the same update

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out()

    @override
    @never_raise
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out()

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._leave_out()

    def _leave_out(self) -> None:
        """What comes until the next batch is no part of a step."""
        if self._active and self._stage is Stage.PLAIN:
            synchronize(self._device)
            self._timer.pause()

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with pause(trainer):  # of whoever times the steps, too
            self._finish(trainer, pl_module)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._open.close()
        if trainer.world_size == 1:  # the end of a trace waits for the device, and a collective may never end
            self.disable()

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.disable()

    def disable(self) -> None:
        """Measure no more in this fit."""
        if self._active:
            self._active = False
            self._open.close()
            self._attached.close()
            self._profiler.stop()

    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        """Explain what was measured; write it and print it if that is wanted."""
        if not self._active:
            return
        self._leave_out()
        self.disable()
        if not self._timer.updates:
            rank_zero_warn(f"OperationProfiler has measured no step: it needs {self.warmup_steps + 1} updates")
            return
        trace, noise = self._profiler.trace(), noise_between(self._load, cpu_seconds())
        if self._profiler.error is not None:
            self._notes.append(f"there is no trace: {self._profiler.error}")
        is_telling = time.perf_counter() - self._began >= TELLING_S
        measured = Measured(
            title=getattr(module, "title", type(module).__name__),
            device=self._device,
            precision=str(trainer.precision),
            batch_size=self._batch_size,
            updates=self._timer.updates,
            recorder=self._recorder if self._records else None,
            events=trace["traceEvents"],
            calibration=self._calibration,
            others=noise.others_share if is_disturbed(noise) else 0.0,
            noise=noise if is_telling else Noise(),
            is_judged=trainer.world_size == 1
            and not any(isinstance(one, ThroughputMonitor) for one in callbacks_of(trainer)),
            notes=self._notes,
        )
        self.explanation = explain(measured)
        self.files = {FILE: json.dumps(self.explanation.to_dict(), indent=1).encode()}
        if self.explanation.trace_steps:
            self.files[TRACE] = gzip.compress(json.dumps(trace).encode(), compresslevel=6)
        if self.dirpath is not None:
            try:
                self.folder = write_folder(Path(self.dirpath), self.files)
            except OSError as error:
                rank_zero_warn(f"OperationProfiler: {self.dirpath} cannot be written: {why(error)}")
        if self.verbose:
            say("\n" + as_text(self.explanation))


class UpdateTimer:
    """Divides updates into parts that add up to the time from the start of one to the start of the next.

    Attributes:
        updates: the seconds of every timed update by part: `data_wait`, `transfer`, `batch` and `other`.
    """

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []
        self._marked = 0.0
        self._is_paused = True

    @contextlib.contextmanager
    def attached(self, trainer: Trainer) -> Iterator[None]:
        """Time the loader and the copy to the device."""
        hook = attach_profiler_hook(
            trainer,
            _PART_OF_ACTION,
            lambda _: self.mark("other"),
            lambda action: self.mark(_PART_OF_ACTION[action]),
        )
        try:
            yield
        finally:
            detach_profiler_hook(trainer, hook)

    def begin_batch(self, is_first: bool, is_timed: bool) -> None:
        """A batch is there, the first one of its update or a later one."""
        self.mark("other")
        if is_first and is_timed:
            self.updates.append(defaultdict(float))
        self._is_paused = not is_timed

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to this part of the update."""
        now = time.perf_counter()
        if not self._is_paused:
            self.updates[-1][part] += now - self._marked
        self._marked = now

    def pause(self) -> None:
        """Something else than training happens until the next batch begins."""
        self.mark("other")
        self._is_paused = True


def synchronize(device: torch.device) -> None:
    """Wait for an asynchronous device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
