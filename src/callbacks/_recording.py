"""The recorded updates of a fit: their operations, for FLOPs and the evidence for the bottleneck, and their memory."""

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
from .._torch import compiled_frame_count, end_mode, is_compiled, is_dispatch_mode_active
from ..errors import in_one_line
from ..hardware.device_memory import SavedTensors, storage_bytes, training_memory
from ..hardware.devices import cache_bytes
from ..hardware.flops import UncountableError, flops_per_sample
from ..hardware.operations import OperationRecorder
from ..records.operations import OperationRow
from ._batches import NO_TENSORS, bytes_in, has_variable_length, tensors_in
from ._timer import Batch

CALLS_COMPILED = "the step calls a function that torch.compile has compiled"
FIRST_RECORDED, LAST_RECORDED = 2, 4  # the updates that are recorded: the first one includes one-time work
_TOO_SHORT = f"recording begins with update {FIRST_RECORDED}"
_NO_BACKWARD = f"no backward pass ran in the updates {FIRST_RECORDED} to {LAST_RECORDED}"


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a sample, forward and backward."""

    per_sample: float | None = None  # None where they are unknown
    why_not: str = "no step was recorded"
    shares: Mapping[str, float] | None = None  # of the kinds of product
    is_given: bool = False  # by an argument, so that they hold for every step and not only for the recorded ones


class RecordedUpdates:
    """Records the updates 2 to 4 of a fit. A recorded step is slower, and no rate includes it.

    A module compiled by torch.compile runs uncompiled in these updates, because a recorder sees no compiled operation. So
    they give the FLOPs of a sample, but not the operations of a compiled step. Updates are then numbered from the start of
    the training, so that a resumed training executes each update in the same mode.

    Nothing is recorded where the step calls another function that torch.compile compiles in this fit. A function that an
    earlier fit of the process has compiled is not noticed: its operations are recorded as they run uncompiled.

    A module whose parameters are sharded is not recorded.

    The memory of a step consists of parameters, gradients, optimizer states and the tensors that autograd saves in a recorded
    forward pass. On CUDA the peak of torch's allocator is measured, too, and `rest` is that peak minus the parts. The module,
    its optimizers and the random states do not change (docs/measuring.md, Memory).

    Args:
        trainer, module: of the fit.
        is_wanted: whether anything is recorded.
        current_part: returns the part of the step that runs now.

    Attributes:
        last_update: the number of the last update of the fit that may be recorded, from 1; 0 for none.
        batch_bytes: the bytes of the largest recorded batch.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, is_wanted: bool, current_part: Callable[[], str]):
        self.recorder = OperationRecorder(module, cache_bytes(trainer.strategy.root_device), current_part)
        self._trainer, self._module, self._is_compiled = trainer, module, is_compiled_module(module)
        self._is_wanted = is_wanted
        # With sharded parameters a recorder does not see the operations that run without it.
        is_replicated = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        self._is_sharded = not is_replicated or isinstance(trainer.strategy, DeepSpeedStrategy)  # a DDPStrategy, too
        self._saved_tensors = SavedTensors(trainer.strategy.root_device)
        self._peak_before = self._peak()
        self._peak_in_fit: int | None = None
        self._memory_parts: dict[str, int] | None = None  # bytes of each part of the memory, once measured
        self._frames_before = compiled_frame_count()  # frames compiled in earlier fits of this process
        self._updates_before = trainer.global_step if self._is_compiled else 0  # in earlier fits of the training
        resumed = f"the training was resumed after update {LAST_RECORDED}, and compiled steps are recorded before that"
        reasons = {
            "record_operations=False": not is_wanted,
            "the parameters are sharded": self._is_sharded,
            resumed: self._updates_before >= LAST_RECORDED,
        }
        self._obstacle = next((reason for reason, holds in reasons.items() if holds), None)
        self.last_update = 0 if self._obstacle else LAST_RECORDED - self._updates_before
        self.batch_bytes = 0
        self._batch: Any = None  # the current batch of an update that may be recorded
        self._contexts: contextlib.ExitStack | None = None
        self._last_begun = 0  # the number of the last update that has begun
        self._recorded_batches: dict[int, list[Batch]] = {}  # the batches of each recorded update, by its number

    @property
    def is_active(self) -> bool:
        """Whether operations are being recorded."""
        return self._contexts is not None

    @property
    def is_over(self) -> bool:
        """Whether no further update will be recorded."""
        return not self.last_update or self._last_begun > LAST_RECORDED

    def expect(self, batch: Any) -> None:
        """Keep a batch whose training is about to begin, if its update may be recorded."""
        if not self.is_over:
            self._batch = batch

    def start(self, update: int, global_step: int, timed: Batch) -> None:
        """Begin to record a batch, if its update is to be recorded.

        Args:
            update: the number of the update in the fit, from 1.
            global_step: Lightning's, before the batch.
            timed: the timer's entry for the batch, whose samples may be counted later.
        """
        if not self.last_update or self.is_active:
            return
        self._last_begun = update = global_step + 1 if self._is_compiled else update
        if not FIRST_RECORDED <= update <= LAST_RECORDED:
            return
        if compiled_frame_count() > self._frames_before and not self._is_compiled:  # the function would run uncompiled
            self._obstacle = CALLS_COMPILED
            return
        # Another callback's mode may end within the step, and would end this recorder's instead.
        if is_dispatch_mode_active():
            self._obstacle = "another recorder of operations was active"
            return
        if update not in self._recorded_batches:
            self.recorder.next_step()
        self._recorded_batches.setdefault(update, []).append(timed)
        self.batch_bytes = max(self.batch_bytes, bytes_in(self._batch))
        self._contexts = contextlib.ExitStack()
        if self._is_compiled:
            self._contexts.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            existing_tensors = [*self._module.parameters(), *self._module.buffers(), *tensors_in(self._batch)]
            self._contexts.enter_context(self._saved_tensors.watch(existing_tensors))
        self.recorder.__enter__()

    def stop(self) -> None:
        """End the recording of a batch, even if the step has left dispatch modes of its own active."""
        contexts, self._contexts, self._batch = self._contexts, None, None
        if contexts is not None:
            end_mode(self.recorder)
            contexts.close()
            if LAST_RECORDED in self._recorded_batches:  # the optimizer has its states, as in every later step
                self.measure_memory()

    def measure_memory(self) -> None:
        """Measure the existing parts of a step's memory and the peak so far, unless they were measured before."""
        if self._memory_parts is not None or self._is_sharded:  # a rank holds only a part of a sharded tensor
            return
        parameters, optimizers = list(self._module.parameters()), self._trainer.optimizers
        self._memory_parts = {
            "parameters": storage_bytes(parameters),
            "optimizer": storage_bytes(tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])),
            # An update leaves its gradients until the next `zero_grad`, unless the module frees them itself.
            "gradients": storage_bytes(p.grad for p in parameters)
            or storage_bytes(p for p in parameters if p.requires_grad),
        }
        if (peak := self._peak()) != self._peak_before:  # else that of the sanity validation, or of an earlier fit
            self._peak_in_fit = peak

    def _peak(self) -> int | None:
        """Return the peak bytes of torch's allocator on a CUDA device; None on any other device."""
        device = self._trainer.strategy.root_device
        now_and_peak = training_memory(device) if device.type == "cuda" else None
        return now_and_peak and now_and_peak[1]

    def memory(self) -> dict[str, Any]:
        """Return the parts of a step's memory, in bytes; empty where nothing was to be recorded.

        `uncounted` says why the bytes that autograd saves are unknown.
        """
        uncounted = self._why_saved_unknown()
        facts: dict[str, Any] = {"uncounted": uncounted} if uncounted and self._is_wanted else {}
        if self._memory_parts is None or not self._is_wanted:
            return facts
        parts, peak = dict(self._memory_parts), self._peak_in_fit
        if uncounted is None:
            parts["saved"] = self._saved_tensors.most
            parts |= {"rest": max(0, peak - sum(parts.values()))} if peak else {}
        return facts | ({"measured_bytes": peak} if peak else {}) | {"parts_bytes": parts}

    def _why_saved_unknown(self) -> str | None:
        if self._is_compiled:
            return "a compiled step keeps other tensors than a recorded one would"
        if has_variable_length(self._module):
            return "the sequences have different lengths"
        return self.why_not_recorded or (None if self._has_trained else _TOO_SHORT)

    @property
    def why_not_recorded(self) -> str | None:
        """Return why nothing was recorded; None where an update was recorded."""
        if self.recorder.error is not None:
            return in_one_line(self.recorder.error)
        if self._has_trained and self._module.automatic_optimization:  # a manual backward pass may go unseen
            parts = {row.part for step in self.recorder.steps for row in step}
            return None if "backward" in parts else _NO_BACKWARD  # training_step has returned None
        return None if any(self.recorder.steps) else self._obstacle or _TOO_SHORT

    @property
    def _has_trained(self) -> bool:
        return any(batch.is_trained for batches in self._recorded_batches.values() for batch in batches)

    @property
    def why_no_operations(self) -> str | None:
        """Return why the operations of a step are unknown; None where they are known."""
        return "the step is compiled" if self.why_not_recorded is None and self._is_compiled else self.why_not_recorded

    def operations(self) -> Sequence[OperationRow]:
        """Return the operations of a step; none if no step was recorded, the module is compiled, or the recorder failed."""
        return [] if self._is_compiled else self.recorder.operations()

    def flops(self) -> Flops:
        """Return the FLOPs of a sample, or why they are unknown; warn if recorded operations cannot be counted."""
        samples = [sum(batch.samples for batch in batches) for batches in self._recorded_batches.values()]
        reason = self.why_not_recorded
        if has_variable_length(self._module):
            reason = "sequences of different lengths take different numbers of FLOPs"
        elif reason is None:
            try:
                return self._count_flops(samples)
            except UncountableError as error:
                reason, name = str(error), type(self._module).__name__
                with contextlib.suppress(Warning):  # where warnings are errors
                    rank_zero_warn(f"The FLOPs of {name} cannot be counted, so there is no FLOP/s and no MFU: {reason}")
        return Flops(why_not=reason)

    def _count_flops(self, samples: Sequence[float]) -> Flops:
        if self.recorder.uncounted is not None:
            raise UncountableError(f"the FLOPs of {self.recorder.uncounted} are not known")
        if not all(samples):
            raise UncountableError(NO_TENSORS)
        per_sample, shares = flops_per_sample(list(zip(self.recorder.steps, samples, strict=True)))
        return Flops(per_sample, shares=shares)


def is_compiled_module(module: LightningModule) -> bool:
    """Whether torch.compile has compiled a module or a part of it."""
    return compiler_context(module) is not None or any(map(is_compiled, module.modules()))
