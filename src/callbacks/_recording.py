"""The recorded updates of a fit: their operations, for FLOPs and the evidence for the bottleneck, and what they hold."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves

from .._lightning import compiler_context
from .._torch import any_mode, compiled_frames, end_mode, is_compiled
from ..errors import in_one_line
from ..hardware.device_memory import SavedTensors, bytes_of, memory_of
from ..hardware.devices import cache_bytes
from ..hardware.flops import UncountableError, flops_per_sample
from ..hardware.operations import OperationRecorder
from ..records.operations import OperationRow
from ._batches import NO_TENSORS, bytes_in, tensors_in, varies
from ._timer import Batch

CALLS_COMPILED = "the step calls a function that torch.compile has compiled"
FIRST_RECORDED, LAST_RECORDED = 2, 4  # the updates that are recorded: the first one pays for work that is done once
_TOO_SHORT = f"recording begins with update {FIRST_RECORDED}"
_NO_BACKWARD = f"no backward pass ran in the updates {FIRST_RECORDED} to {LAST_RECORDED}"


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a sample, forward and backward."""

    per_sample: float | None = None  # None where they are not known
    why_not: str = "no step was recorded"
    shares: Mapping[str, float] | None = None  # of the kinds of product
    is_given: bool = False  # by an argument: they are of every step, and not of the recorded ones


class RecordedUpdates:
    """Records the updates 2 to 4 of a fit. A recorded step is slower, and no rate is read from it.

    A module that torch.compile has compiled runs uncompiled in these updates, because a recorder sees no compiled operation. So
    they give the FLOPs of a sample, and not the operations of a compiled step. Updates are then numbered from the start of
    the training, so that a resumed training executes each update in the same mode.

    Nothing is recorded where the step calls another function that torch.compile compiles in this fit. One that an earlier
    fit of the process has compiled is not noticed: its operations are recorded as they run uncompiled.

    A module whose parameters are sharded is not recorded.

    The memory of a step consists of parameters, gradients and optimizer states, and of what autograd saves in a recorded forward
    pass. On CUDA the peak of torch's allocator is beside them, and `rest` is what that peak has beyond the parts. Nothing of the
    module, its optimizers or the random states changes (docs/measuring.md, Memory).

    Args:
        trainer, module: of the fit.
        wanted: whether anything is recorded.
        part: returns the part of the step that runs now.

    Attributes:
        last: the last update of the fit that may be recorded, counted from 1; 0 for none.
        batch_bytes: of the largest batch that was recorded.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, wanted: bool, part: Callable[[], str]):
        self.recorder = OperationRecorder(module, cache_bytes(trainer.strategy.root_device), part)
        self._trainer, self._module, self._is_compiled = trainer, module, is_compiled_module(module)
        self._is_wanted = wanted
        # Of sharded parameters a recorder does not see the operations that would run without it.
        is_whole = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        self._is_sharded = not is_whole or isinstance(trainer.strategy, DeepSpeedStrategy)  # which is a DDPStrategy
        self._saved = SavedTensors(trainer.strategy.root_device)
        self._peak_before = self._peak()
        self._peak_in_fit: int | None = None
        self._parts: dict[str, int] | None = None  # of the memory, once they are measured
        self._compiled_before = compiled_frames()  # in earlier fits of this process
        self._before = trainer.global_step if self._is_compiled else 0  # the updates before the first one that counts
        resumed = f"the training was resumed after update {LAST_RECORDED}, and what is compiled is recorded before that"
        reasons = {
            "record_operations=False": not wanted,
            "the parameters are sharded": self._is_sharded,
            resumed: self._before >= LAST_RECORDED,
        }
        self._why_not = next((why for why, holds in reasons.items() if holds), None)
        self.last = 0 if self._why_not else LAST_RECORDED - self._before
        self.batch_bytes = 0
        self._batch: Any = None  # the one that has come, of an update that may be recorded
        self._running: contextlib.ExitStack | None = None
        self._begun = 0  # the last update that was begun
        self._recorded: dict[int, list[Batch]] = {}  # the batches of each recorded update

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
        if not self.is_over:
            self._batch = batch

    def start(self, update: int, global_step: int, timed: Batch) -> None:
        """Begin to record a batch, if its update is to be recorded.

        Args:
            update: the number of the update in the fit, from 1.
            global_step: Lightning's, before the batch.
            timed: the batch, whose samples may be counted later.
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
        if update not in self._recorded:
            self.recorder.next_step()
        self._recorded.setdefault(update, []).append(timed)
        self.batch_bytes = max(self.batch_bytes, bytes_in(self._batch))
        self._running = contextlib.ExitStack()
        if self._is_compiled:
            self._running.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            others = [*self._module.parameters(), *self._module.buffers(), *tensors_in(self._batch)]
            self._running.enter_context(self._saved.watch(others))
        self.recorder.__enter__()

    def stop(self) -> None:
        """End the recording of a batch, also where the step has left modes of its own behind."""
        running, self._running, self._batch = self._running, None, None
        if running is not None:
            end_mode(self.recorder)
            running.close()
            if LAST_RECORDED in self._recorded:  # the optimizer has its states, and a step is as every later one
                self.measure_memory()

    def measure_memory(self) -> None:
        """Measure what exists now of a step's memory and the peak up to now, unless that was done."""
        if self._parts is not None or self._is_sharded:  # no rank has what a sharded module seems to have
            return
        parameters, optimizers = list(self._module.parameters()), self._trainer.optimizers
        self._parts = {
            "parameters": bytes_of(parameters),
            "optimizer": bytes_of(tree_leaves([list(each.state.values()) for each in optimizers])),
            # An update leaves its gradients until the next `zero_grad`, unless the module frees them itself.
            "gradients": bytes_of(p.grad for p in parameters) or bytes_of(p for p in parameters if p.requires_grad),
        }
        if (peak := self._peak()) != self._peak_before:  # else it is of the sanity validation, or of an earlier fit
            self._peak_in_fit = peak

    def _peak(self) -> int | None:
        """The most bytes that torch's allocator has held on the device; None but on CUDA."""
        device = self._trainer.strategy.root_device
        held = memory_of(device) if device.type == "cuda" else None
        return held and held[1]

    def memory(self) -> dict[str, Any]:
        """What the memory of a step consists of, in bytes; empty where nothing was to be recorded.

        `uncounted` says why it is not known what autograd saves.
        """
        uncounted = self._why_not_saved()
        facts: dict[str, Any] = {"uncounted": uncounted} if uncounted and self._is_wanted else {}
        if self._parts is None or not self._is_wanted:
            return facts
        parts, peak = dict(self._parts), self._peak_in_fit
        if uncounted is None:
            parts["saved"] = self._saved.most
            parts |= {"rest": max(0, peak - sum(parts.values()))} if peak else {}
        return facts | ({"measured_bytes": peak} if peak else {}) | {"parts_bytes": parts}

    def _why_not_saved(self) -> str | None:
        if self._is_compiled:
            return "a compiled step keeps other tensors than a recorded one would"
        if varies(self._module):
            return "the sequences have different lengths"
        return self.reason or (None if self._has_trained else _TOO_SHORT)

    @property
    def reason(self) -> str | None:
        """Why nothing was recorded; None where something was."""
        if self.recorder.error is not None:
            return in_one_line(self.recorder.error)
        if self._has_trained and self._module.automatic_optimization:  # by hand, a pass may be unseen
            parts = {row.part for step in self.recorder.steps for row in step}
            return None if "backward" in parts else _NO_BACKWARD  # training_step has returned None
        return None if any(self.recorder.steps) else self._why_not or _TOO_SHORT

    @property
    def _has_trained(self) -> bool:
        return any(batch.trained for batches in self._recorded.values() for batch in batches)

    @property
    def why_no_operations(self) -> str | None:
        """Why the operations of a step are not known; None where they are."""
        return "the step is compiled" if self.reason is None and self._is_compiled else self.reason

    def operations(self) -> Sequence[OperationRow]:
        """The operations of a step; none where no step was recorded, where it is compiled, or where the recorder failed."""
        return [] if self._is_compiled else self.recorder.operations()

    def flops(self) -> Flops:
        """The FLOPs of a sample, or why they are not known: with a warning where it is for the recorded operations."""
        samples = [sum(batch.samples for batch in batches) for batches in self._recorded.values()]
        why = self.reason
        if varies(self._module):
            why = "sequences of different lengths take different numbers of FLOPs"
        elif why is None:
            try:
                return self._count_flops(samples)
            except UncountableError as error:
                why, name = str(error), type(self._module).__name__
                rank_zero_warn(f"The FLOPs of {name} cannot be counted, so there is no FLOP/s and no MFU: {why}")
        return Flops(why_not=why)

    def _count_flops(self, samples: Sequence[float]) -> Flops:
        if self.recorder.uncounted is not None:
            raise UncountableError(f"the FLOPs of {self.recorder.uncounted} are not known")
        if not all(samples):
            raise UncountableError(NO_TENSORS)
        counted, shares = flops_per_sample(list(zip(self.recorder.steps, samples, strict=True)))
        return Flops(counted, shares=shares)


def is_compiled_module(module: LightningModule) -> bool:
    """Whether torch.compile has compiled a module or a part of it."""
    return compiler_context(module) is not None or any(map(is_compiled, module.modules()))
