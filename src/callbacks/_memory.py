"""StepMemory: what takes the memory of a training step, as it was measured in the training itself."""

from contextlib import AbstractContextManager
from typing import Any

from lightning import LightningModule, Trainer
from torch.utils._pytree import tree_leaves

from ..hardware.device_memory import SavedTensors, bytes_of, memory_of


class StepMemory:
    """The parts of a step's memory: parameters, gradients and optimizer states, and what autograd saves for the backward pass.

    On CUDA the peak of torch's allocator is beside them, and `rest` is what that peak has beyond the parts. Nothing of the
    module, its optimizers or the random states changes (docs/measuring.md, Memory).

    Args:
        trainer, module: of the fit, which begins.
    """

    def __init__(self, trainer: Trainer, module: LightningModule):
        self._trainer, self._module = trainer, module
        self._saved = SavedTensors(trainer.strategy.root_device)
        self._peak_before = self._peak()
        self._peak_in_fit: int | None = None
        self._parts: dict[str, int] | None = None  # once they are measured

    def watch(self, batch: Any) -> AbstractContextManager[None]:
        """Watch what autograd saves in a training step."""
        return self._saved.watch([*self._module.parameters(), *self._module.buffers(), *tree_leaves(batch)])

    def measure(self) -> None:
        """Measure the parts that exist now and the peak up to now; only the first call does."""
        if self._parts is not None:
            return
        parameters, optimizers = list(self._module.parameters()), self._trainer.optimizers
        self._parts = {
            "parameters": bytes_of(parameters),
            "optimizer": bytes_of(tree_leaves([list(each.state.values()) for each in optimizers])),
            # An update leaves its gradients until the next `zero_grad`, unless the module frees them itself.
            "gradients": bytes_of(p.grad for p in parameters) or bytes_of(p for p in parameters if p.requires_grad),
        }
        peak = self._peak()
        if peak != self._peak_before:  # else it is of the sanity validation, or of an earlier fit
            self._peak_in_fit = peak

    def facts(self, uncounted: str | None) -> dict[str, Any]:
        """What was measured, in bytes; `uncounted` says why it is not known what autograd saves, None that it is."""
        facts: dict[str, Any] = {"uncounted": uncounted} if uncounted else {}
        if self._parts is None:
            return facts
        parts, peak = dict(self._parts), self._peak_in_fit
        if uncounted is None:
            parts["saved"] = self._saved.most
            parts |= {"rest": max(0, peak - sum(parts.values()))} if peak else {}
        return facts | ({"measured_bytes": peak} if peak else {}) | {"parts_bytes": parts}

    def _peak(self) -> int | None:
        """The most bytes that torch's allocator has held on the device; None but on CUDA."""
        device = self._trainer.strategy.root_device
        held = memory_of(device) if device.type == "cuda" else None
        return held and held[1]
