"""MemoryMonitor: what takes the memory of a training step, as it was measured in the training itself."""

import contextlib
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from .._torch import compiled_frames
from ..hardware.device_memory import SavedTensors, bytes_of, memory_of
from ._batches import samples_in, varies
from ._never_raise import never_raise
from ._recording import CALLS_COMPILED, FIRST, LAST, can_be_recorded, is_compiled_module
from ._updates import Updates


class MemoryMonitor(Callback):
    """Says what the memory of a training step consists of.

    The parts are the parameters, gradients and optimizer states that exist after the fourth update, and what autograd saved
    for the backward pass in the updates 2 to 4, on the device that trains. On CUDA the peak of torch's allocator up to then is
    beside them, and `rest` is what that peak has beyond the parts.

    Nothing is said of what autograd saved where the step is compiled. A function that an earlier fit of the process has
    compiled, and that is no attribute of the module, is not noticed. Where the parameters are sharded there are no parts.

    After the fit `facts` has the result, and the run's record as `memory`. Nothing of the module, its optimizers or the random
    states changes, and nothing is run that the training does not run (docs/measuring.md, Memory).
    """

    observes_only = True

    def __init__(self) -> None:
        self.failure: str | None = None  # the exception that has ended the measurement
        self.facts: dict[str, Any] = {}
        self._saved: SavedTensors | None = None  # None where what is saved cannot be seen
        self._watching = contextlib.ExitStack()
        self._peak_before: int | None = None  # of torch's allocator, when training began
        self._updates = Updates()
        self._active = False

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the facts, as `memory`."""
        return {"memory": self.facts}

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.disable()
        self.facts, self.failure = {"uncounted": "no batch was trained"}, None
        self._updates = Updates(trainer.global_step)
        self._compiled_before = compiled_frames()
        self._peak_before = self._peak(trainer)
        self._saved, self._active = SavedTensors(trainer.strategy.root_device), True

    def _why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        if is_compiled_module(module):
            return "a compiled step keeps other tensors than a recorded one would"
        if compiled_frames() > self._compiled_before:
            return CALLS_COMPILED
        if not can_be_recorded(trainer):
            return "the parameters are sharded"
        return "the sequences have different lengths" if varies(module) else None

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._active or self._updates.count >= LAST:
            return
        if self._updates.count == 0:
            samples = samples_in(batch)
            self.facts = ({"batch_size": samples} if samples else {}) | {
                "uncounted": f"recording begins with update {FIRST}"
            }
        if why := self._why_not(trainer, pl_module):
            self._saved, self.facts["uncounted"] = None, why
        elif self._saved is not None and self._updates.count + 1 >= FIRST:
            others = [*pl_module.parameters(), *pl_module.buffers(), *tree_leaves(batch)]
            self._watching.enter_context(self._saved.watch(others))

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if pl_module.automatic_optimization:  # else `training_step` goes on, and may be within hooks of its own
            self._watching.close()

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._active:
            return
        self._watching.close()
        if self._saved is not None and self._updates.count + 1 >= FIRST:
            self.facts.pop("uncounted", None)
        self._updates.end_batch(trainer.global_step)
        if self._updates.count >= LAST:  # the optimizer has its states, and a step is as every later one
            self._measure(trainer, pl_module)

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer, pl_module)
        if self.failure and "parts_bytes" not in self.facts:
            self.facts["uncounted"] = f"the measurement ended with {self.failure}"

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._watching.close()
        if self._updates.count:
            self._measure(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.disable()

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._watching.close()
        self._active, self._saved = False, None

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        """Take the parts that exist and what the device tells, once in a fit."""
        if not self._active:
            return
        measured = self._peak(trainer)
        if measured == self._peak_before:  # of the sanity validation, or of an earlier fit
            measured = None
        if measured:
            self.facts["measured_bytes"] = measured
        if can_be_recorded(trainer):  # else no rank has what the module seems to have
            self.facts["parts_bytes"] = self._parts(trainer, module, measured)
        self.disable()

    def _parts(self, trainer: Trainer, module: LightningModule, measured: int | None) -> dict[str, int]:
        parameters = list(module.parameters())
        parts = {
            "parameters": bytes_of(parameters),
            "optimizer": bytes_of(tree_leaves([list(each.state.values()) for each in trainer.optimizers])),
            # An update leaves its gradients until the next `zero_grad`, unless the module frees them itself.
            "gradients": bytes_of(p.grad for p in parameters) or bytes_of(p for p in parameters if p.requires_grad),
        }
        if self._saved is not None and "uncounted" not in self.facts:
            parts["saved"] = self._saved.most
            if measured:
                parts["rest"] = max(0, measured - sum(parts.values()))
        return parts

    def _peak(self, trainer: Trainer) -> int | None:
        """The most bytes that torch's allocator has held on the device; None but on CUDA."""
        device = trainer.strategy.root_device
        told = memory_of(device) if device.type == "cuda" else None
        return told and told[1]
