"""The recorded updates of a fit: their operations, for FLOPs and the evidence for the bottleneck, and what they hold."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn

from .._lightning import compiler_context
from .._torch import any_mode, compiled_frames, end_mode, is_compiled
from ..errors import in_one_line
from ..hardware.devices import cache_bytes
from ..hardware.flops import UncountableError, flops_per_sample
from ..hardware.operations import OperationRecorder
from ..records.operations import OperationRow
from ._batches import NO_TENSORS, bytes_in, varies
from ._measured import Flops
from ._memory import StepMemory

CALLS_COMPILED = "the step calls a function that torch.compile has compiled"
FIRST_RECORDED, LAST_RECORDED = 2, 4  # the updates that are recorded: the first one pays for work that is done once


class RecordedUpdates:
    """Records the updates 2 to 4 of a fit. A recorded step is slower, and no rate is read from it.

    A module that torch.compile has compiled runs uncompiled in these updates, because a recorder sees no compiled operation. So
    they give the FLOPs of a sample, and not the operations of a compiled step. Updates are then numbered from the start of
    the training, so that a resumed training executes each update in the same mode.

    Nothing is recorded where the step calls another function that torch.compile compiles in this fit. One that an earlier
    fit of the process has compiled is not noticed: its operations are recorded as they run uncompiled.

    A module whose parameters are sharded is not recorded.

    Args:
        trainer, module: of the fit.
        wanted: whether anything is recorded.
        part: returns the part of the step that runs now.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, wanted: bool, part: Callable[[], str]):
        self.recorder = OperationRecorder(module, cache_bytes(trainer.strategy.root_device), part)
        self._module, self._is_compiled = module, is_compiled_module(module)
        self._is_wanted, self._is_sharded = wanted, not can_be_recorded(trainer)
        self._memory = StepMemory(trainer, module)
        self._batch: Any = None  # the one that has come, of an update that may be recorded
        self._compiled_before = compiled_frames()  # in earlier fits of this process
        started_at = trainer.global_step if self._is_compiled else 0
        self._why_not: str | None = None
        if not wanted:
            self._why_not = "record_operations=False"
        elif self._is_sharded:
            self._why_not = "the parameters are sharded"
        elif started_at >= LAST_RECORDED:
            self._why_not = (
                f"the training was resumed after update {LAST_RECORDED}, and what is compiled is recorded before that"
            )
        self.last = (
            0 if self._why_not else LAST_RECORDED - started_at
        )  # the last update of the fit that may be recorded
        self._running: contextlib.ExitStack | None = None
        self._update = self._begun = 0  # the last that was recorded, and the last that was begun
        self._samples: list[float] = []  # of each recorded update
        self._is_counted = True  # whether they hold those of the last batch that was recorded
        self.batch_bytes = 0  # of the largest batch that was recorded
        self._has_trained = False  # whether a recorded batch was trained to its end

    @property
    def active(self) -> bool:
        """Whether operations are being recorded."""
        return self._running is not None

    @property
    def is_over(self) -> bool:
        """Whether no update will be recorded any more."""
        return not self.last or self._begun > LAST_RECORDED

    def expect(self, batch: Any) -> None:
        """A batch has come, whose training is to begin."""
        if self.last and self._begun <= LAST_RECORDED:
            self._batch = batch

    def start(self, update: int, global_step: int) -> None:
        """Begin to record a batch, if its update is to be recorded.

        Args:
            update: the number of the update in the fit, from 1.
            global_step: Lightning's, before the batch.
        """
        if not self.last or self.active:
            return
        self._begun = update = global_step + 1 if self._is_compiled else update
        if not FIRST_RECORDED <= update <= LAST_RECORDED:
            return
        if compiled_frames() > self._compiled_before and not self._is_compiled:  # it would run uncompiled
            self._why_not = CALLS_COMPILED
            return
        if any_mode():  # of another callback, which may end within the step, and would end this one instead
            self._why_not = "another recorder of operations was active"
            return
        if update != self._update:
            self.recorder.next_step()
            self._samples.append(0)
            self._update = update
        self._is_counted = False
        self.batch_bytes = max(self.batch_bytes, bytes_in(self._batch))
        self._running = contextlib.ExitStack()
        if self._is_compiled:
            self._running.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            self._running.enter_context(self._memory.watch(self._batch))
        self.recorder.__enter__()

    def count(self, samples: float) -> None:
        """The batch that has just been trained holds so many samples."""
        if not self._is_counted:
            self._samples[-1] += samples
            self._is_counted = self._has_trained = True

    def stop(self) -> None:
        """End the recording of a batch, also where the step has left modes of its own behind."""
        running, self._running, self._batch = self._running, None, None
        if running is not None:
            end_mode(self.recorder)
            running.close()
            if self._update == LAST_RECORDED:  # the optimizer has its states, and a step is as every later one
                self.measure_memory()

    def measure_memory(self) -> None:
        """Measure what exists now of a step's memory, unless that was done."""
        if not self._is_sharded:  # else no rank has what the module seems to have
            self._memory.measure()

    def memory(self) -> dict[str, Any]:
        """What the memory of a step consists of, in bytes; empty where nothing was to be recorded."""
        return self._memory.facts(self._why_not_saved()) if self._is_wanted else {}

    def _why_not_saved(self) -> str | None:
        if self._is_compiled:
            return "a compiled step keeps other tensors than a recorded one would"
        if varies(self._module):
            return "the sequences have different lengths"
        return self.reason or (None if self._has_trained else f"recording begins with update {FIRST_RECORDED}")

    @property
    def reason(self) -> str | None:
        """Why nothing was recorded; None where something was."""
        if self.recorder.error is not None:
            return in_one_line(self.recorder.error)
        if any(self.recorder.steps):
            return None
        return self._why_not or f"recording begins with update {FIRST_RECORDED}"

    @property
    def why_no_operations(self) -> str | None:
        """Why the operations of a step are not known; None where they are."""
        return "the step is compiled" if self.reason is None and self._is_compiled else self.reason

    def operations(self) -> Sequence[OperationRow]:
        """The operations of a step; none where no step was recorded, where it is compiled, or where the recorder failed."""
        return [] if self._is_compiled else self.recorder.operations()

    def flops(self) -> Flops:
        """The FLOPs of a sample, or why they are not known: with a warning where it is for the recorded operations."""
        try:
            counted, shares = self._count_flops()
        except UncountableError as error:
            if self.reason is None and not varies(self._module):
                name = type(self._module).__name__
                rank_zero_warn(f"The FLOPs of {name} cannot be counted, so there is no FLOP/s and no MFU: {error}")
            return Flops(why_not=str(error))
        return Flops(counted, shares=shares)

    def _count_flops(self) -> tuple[float, dict[str, float]]:
        if varies(self._module):
            raise UncountableError("sequences of different lengths take different numbers of FLOPs")
        if self.reason is not None:
            raise UncountableError(self.reason)
        if self.recorder.uncounted is not None:
            raise UncountableError(f"the FLOPs of {self.recorder.uncounted} are not known")
        if not all(self._samples):
            raise UncountableError(NO_TENSORS)
        return flops_per_sample(list(zip(self.recorder.steps, self._samples, strict=True)))


def can_be_recorded(trainer: Trainer) -> bool:
    """Whether a recorder sees the operations that would run without it: not those on sharded parameters."""
    return type(trainer.strategy) in (SingleDeviceStrategy, DDPStrategy)


def is_compiled_module(module: LightningModule) -> bool:
    """Whether torch.compile has compiled a module or a part of it."""
    return compiler_context(module) is not None or any(map(is_compiled, module.modules()))
