"""The recorded updates of a fit: their operations, which give the FLOPs of a sample and the evidence for the bottleneck."""

import contextlib
from collections.abc import Callable, Sequence

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from .._lightning import compiler_context
from .._torch import any_mode, end_mode, has_compiled, is_compiled
from ..errors import in_one_line
from ..hardware.flops import StepFlops, UncountableError, flops_per_sample
from ..hardware.operations import Operation, OperationRecorder

FIRST, LAST = 2, 4  # the updates that are recorded: the first one pays for work that is done once


class RecordedUpdates:
    """Records three updates of a fit: `FIRST` to `LAST` by default. A recorded step is slower, and no rate is read from it.

    A module that torch.compile has compiled runs uncompiled in these updates, because a recorder sees no compiled operation. So
    they give the FLOPs of a sample, and not the operations of a compiled step. Updates are then numbered from the start of
    the training, so that a resumed training executes each update in the same mode.

    A module whose parameters are sharded is not recorded.

    Args:
        wanted: whether anything is recorded.
        first: the first update.
    """

    def __init__(self, wanted: bool, first: int = FIRST):
        self.first, self._last = first, first + LAST - FIRST
        self.recorder = OperationRecorder()
        self._wanted = wanted
        self._records = self._is_compiled = False
        self._refusal: str | None = None
        self._running: contextlib.ExitStack | None = None
        self._update = self._begun = 0  # the last that was recorded, and the last that was begun
        self._samples: list[float] = []  # of each recorded update

    def attach(
        self, trainer: Trainer, module: LightningModule, cache_bytes: int | None, part: Callable[[], str]
    ) -> None:
        """Prepare for the trainer's fit; `part` returns the part of the step that runs now."""
        self.recorder = OperationRecorder(module, cache_bytes, part)
        self._records = self._wanted and can_be_recorded(trainer)
        self._is_compiled = is_compiled_module(module)
        self._started_at = trainer.global_step

    @property
    def last(self) -> int:
        """The last update of the fit that may be recorded; 0 if none is."""
        return max(0, self._last - (self._started_at if self._is_compiled else 0)) if self._records else 0

    @property
    def active(self) -> bool:
        """Whether operations are being recorded."""
        return self._running is not None

    @property
    def is_over(self) -> bool:
        """Whether no update will be recorded any more."""
        return not self._records or self._begun > self._last

    def start(self, update: int, global_step: int, samples: float = 0) -> None:
        """Begin to record a batch of so many samples, if its update is to be recorded.

        Args:
            update: the number of the update in the fit, from 1.
            global_step: Lightning's, before the batch.
            samples: of the batch.
        """
        if not self._records or self.active:
            return
        self._begun = update = global_step + 1 if self._is_compiled else update
        if not self.first <= update <= self._last:
            return
        if has_compiled() and not self._is_compiled:  # a function that the module calls: it would run uncompiled
            self._refusal = "this process has used torch.compile"
            return
        if any_mode():  # of another callback, which may end within the step, and would end this one instead
            self._refusal = "another recorder of operations was active"
            return
        if update != self._update:
            self.recorder.next_step()
            self._samples.append(0)
            self._update = update
        self._samples[-1] += samples
        self._running = contextlib.ExitStack()
        if self._is_compiled:
            self._running.enter_context(torch.compiler.set_stance("force_eager"))
        self.recorder.__enter__()

    def stop(self) -> None:
        """End the recording of a batch, also where the step has left modes of its own behind."""
        running, self._running = self._running, None
        if running is not None:
            end_mode(self.recorder)
            running.close()

    @property
    def reason(self) -> str | None:
        """Why nothing was recorded; None where something was."""
        if self.recorder.error is not None:
            return in_one_line(self.recorder.error)
        if any(self.recorder.steps):
            return None
        if not self._wanted:
            return "record_operations=False"
        if not self._records:
            return "the parameters are sharded"
        if self._refusal:
            return self._refusal
        if self._is_compiled and self._started_at >= self._last:
            return f"the training was resumed after update {self._last}, and what is compiled is recorded before that"
        return f"recording begins with update {self.first}"

    @property
    def why_no_operations(self) -> str | None:
        """Why the operations of a step are not known; None where they are."""
        return "the step is compiled" if self.reason is None and self._is_compiled else self.reason

    def operations(self) -> Sequence[Operation]:
        """The operations of a step; none where no step was recorded, where it is compiled, or where the recorder failed."""
        return [] if self._is_compiled else self.recorder.operations()

    def flops(self) -> StepFlops:
        """The FLOPs of a sample in the recorded updates.

        Raises:
            UncountableError: where none was recorded, one of their operations has no formula, or they differ.
        """
        if self.reason is not None:
            raise UncountableError(self.reason)
        if self.recorder.uncounted is not None:
            raise UncountableError(f"the FLOPs of {self.recorder.uncounted} are not known")
        if not all(self._samples):
            raise UncountableError("the batch has no tensors; batch_size_fn says how many samples it has")
        return flops_per_sample(list(zip(self.recorder.steps, self._samples, strict=True)))


def can_be_recorded(trainer: Trainer) -> bool:
    """Whether a recorder sees the operations that would run without it: not those on sharded parameters."""
    return type(trainer.strategy) in (SingleDeviceStrategy, DDPStrategy)


def is_compiled_module(module: LightningModule) -> bool:
    """Whether torch.compile has compiled a module or a part of it."""
    return compiler_context(module) is not None or any(map(is_compiled, module.modules()))
