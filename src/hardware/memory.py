"""How much memory a training step takes at its peak, and for what, counted without computing the step.

A copy of the module runs its own `training_step`, `backward` and its optimizers' `step` on fake tensors, which have the
device, the kernels and the autocast of real ones, and no memory. A storage is alive from the operation that makes it to
the moment at which nothing refers to it any more, as it is in a real step.

Left out is what torch does not show: workspaces inside of kernels, the fragmentation of an allocator, the buckets of DDP.
The module, its trainer and the random states stay as they are.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .._lightning import trainer_of
from .._torch import fake_tensors
from ..errors import in_one_line
from .allocations import PARTS, AllocationRecorder, LimitOperations
from .flop_formulas import TooManyOperationsError
from .flops import extrapolated, sequence_length, shortened, without_side_effects
from .meta_copy import CopyTensors, empty_copy, meta_copy

# A fake operation takes 0.1 to 0.3 ms. A step of more operations is counted at three short lengths of its sequences
# first; one that takes seconds is not counted.
_QUICK_OPERATIONS = 3_000
_MOST_OPERATIONS = 15_000
_LARGEST_BATCH = 2**24


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the training device at the peak of a training step."""

    batch_size: int
    stage: str  # the part of the step that the peak lies in: forward, backward or optimizer
    parameters: int
    gradients: int
    optimizer: int  # its states; what its step needs for a moment belongs to the rest
    activations: int  # what the forward pass has made and is still held, recomputation included
    rest: int  # the batch, buffers, and what an operation needs for a moment, such as the gradients of activations

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {part: getattr(self, part) for part in PARTS}


class MemoryCounter:
    """Counts the memory of a module's training step, for any batch size.

    Args:
        module: attached to a trainer or not.
        batch: what its `training_step` takes; only its shapes and types are kept.
        batch_size: the samples in it; by default Lightning's rule, the first dimension of the first tensor.
        optimizers: by default those of the trainer; none without one.

    Attributes:
        reason: why the last count gave None.
    """

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        batch_size: int | None = None,
        optimizers: list[Optimizer] | None = None,
    ):
        self.reason: str | None = None
        self.optimizer_reason: str | None = None  # why the step of an optimizer is left out
        self._module = module
        self._trainer = trainer_of(module)
        known = self._trainer.optimizers if self._trainer is not None else []
        self._optimizers = list(known if optimizers is None else optimizers)
        self.batch_size = batch_size or extract_batch_size(batch)
        self._batch: Any = None
        try:
            with CopyTensors():
                self._batch = copy.deepcopy(batch)
        except Exception as error:  # noqa: BLE001 - a class of batches that takes real tensors only
            self.reason = in_one_line(error)
        self._counted: dict[int, StepMemory | None] = {}

    def at(self, batch_size: int | None = None) -> StepMemory | None:
        """The memory of a step with so many samples; by default as many as the batch has.

        A tensor whose first dimension is the batch's size is given another first dimension, and keeps the others.

        Returns:
            None for a step that depends on the data (`.item()`, an `if` on a tensor), that cannot be copied, or that has
            too many operations; `reason` says which. Never raises.
        """
        size = batch_size or self.batch_size
        if self._batch is None:
            return None
        if size not in self._counted:
            try:
                with without_side_effects():
                    self._counted[size] = self._count_quickly(size)
            except Exception as error:  # noqa: BLE001 - anybody's step, on tensors that it was not written for
                self._counted[size] = None
                self.reason = in_one_line(error)
                error.with_traceback(None)  # whoever keeps the error keeps no tensor of the counted step
        return self._counted[size]

    def largest_batch_that_fits(self, available: float) -> int | None:
        """The largest power of two of samples whose step takes no more than so many bytes.

        Returns:
            0 if a single sample takes more; None if it cannot be counted.
        """
        here, twice = self.at(), self.at(2 * self.batch_size)
        if here is None or twice is None:
            return None
        each = (twice.total - here.total) / self.batch_size
        room = self.batch_size + (available - here.total) / each if each > 0 else _LARGEST_BATCH
        size = 2 ** math.floor(math.log2(min(max(room, 1), _LARGEST_BATCH)))
        while size and not self._fits(size, available):  # the line is exact where the peak stays in the same operation
            size //= 2
        while size and size < _LARGEST_BATCH and self._fits(2 * size, available):
            size *= 2
        return size

    def _fits(self, batch_size: int, available: float) -> bool:
        counted = self.at(batch_size)
        return counted is not None and counted.total <= available

    def _count_quickly(self, batch_size: int) -> StepMemory:
        length = sequence_length(self._batch, self.batch_size)
        if length is None:
            return self._count(batch_size, _MOST_OPERATIONS)
        try:
            return self._count(batch_size, _QUICK_OPERATIONS)
        except TooManyOperationsError:
            return self._count_by_length(batch_size, length) or self._count(batch_size, _MOST_OPERATIONS)

    def _count_by_length(self, batch_size: int, length: int) -> StepMemory | None:
        """Extend the counts at three short lengths to the real one, if the three are on a line; else None."""
        lengths = [length % 8 + base for base in (8, 16, 40)]
        try:
            counts = [self._count(batch_size, _MOST_OPERATIONS, (length, short)) for short in lengths]
        except Exception:  # noqa: BLE001 - a model that takes one length only
            return None
        parts = {part: extrapolated(lengths, tuple(each.parts[part] for each in counts), length) for part in PARTS}
        known = {part: value for part, value in parts.items() if value is not None}
        return StepMemory(batch_size, counts[-1].stage, **known) if len(known) == len(PARTS) else None

    def _count(self, batch_size: int, most_operations: int, cut: tuple[int, int] | None = None) -> StepMemory:
        """The peak of a copy's step; `cut=(T, t)` shortens sequences from T to t steps."""
        device = self._module.device
        recorder, fake = AllocationRecorder(device, most_operations), fake_tensors()
        made: list[Tensor] = []

        def resized(tensor: Tensor) -> Tensor:
            with fake:
                tensor = shortened(tensor, *cut) if cut else tensor
                made.append(_resized(tensor, self.batch_size, batch_size, device))
            return made[-1]

        def as_fake(tensor: Tensor) -> Tensor:
            with fake:
                return empty_copy(tensor, tensor.device)

        with CopyTensors(resized):
            batch = copy.deepcopy(self._batch)
        twin, optimizers = meta_copy(self._module, self._optimizers, as_fake)
        with torch.inference_mode(False), torch.enable_grad(), fake, recorder, LimitOperations(recorder):
            recorder.assign((*made, *twin.buffers()), "rest")
            recorder.assign(twin.parameters(), "parameters")
            step = _Step(twin, optimizers, recorder)
            made.clear()
            step.run(batch, self._trainer)
            self.optimizer_reason = step.optimizer_reason
            stage, parts = recorder.at_peak()
            return StepMemory(batch_size, stage, **parts)


class _Step:
    """An update of a copied module, in Lightning's order: forward, `zero_grad`, backward, the optimizer's step."""

    def __init__(self, twin: LightningModule, optimizers: list[Optimizer], recorder: AllocationRecorder):
        self.twin, self.optimizers, self.recorder = twin, optimizers, recorder
        self.optimizer_reason: str | None = None
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: recorder.assign([p.grad], "gradients"))
        for optimizer in optimizers:  # a module that optimises manually calls these itself
            recorder.assign(tree_leaves(list(optimizer.state.values())), "optimizer")
            vars(optimizer).update(step=partial(self._step, optimizer), zero_grad=partial(self._zero_grad, optimizer))
        backward = twin.backward
        vars(twin).update(dict.fromkeys(("backward", "manual_backward"), partial(self._backward, backward)))

    def run(self, batch: Any, trainer: Any) -> None:
        """Run one update on a batch; with accumulated gradients two batches, since each later one is as the second."""
        batches = min(trainer.accumulate_grad_batches, 2) if trainer is not None else 1
        context = trainer.precision_plugin.train_step_context if trainer is not None else contextlib.nullcontext
        with_index = is_param_in_hook_signature(self.twin.training_step, "batch_idx", min_args=2)
        for index in range(batches):
            with self._in("forward"), context():
                result: Any = self.twin.training_step(batch, index) if with_index else self.twin.training_step(batch)
            if self.twin.automatic_optimization:
                if index == 0:
                    for optimizer in self.optimizers:
                        optimizer.zero_grad()
                self.twin.backward(result["loss"] if isinstance(result, Mapping) else result)
            del result
        if self.twin.automatic_optimization:
            for optimizer in self.optimizers:
                optimizer.step()

    @contextlib.contextmanager
    def _in(self, stage: str) -> Iterator[None]:
        before, self.recorder.stage = self.recorder.stage, stage
        try:
            yield
        finally:
            self.recorder.stage = before

    def _backward(self, backward: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._in("backward"):
            backward(loss, *args, **kwargs)

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        self.recorder.zero_grad()
        type(optimizer).zero_grad(optimizer, set_to_none)

    def _step(self, optimizer: Optimizer, closure: Any = None) -> Any:
        """The optimizer's own step, with the states that it makes; one that cannot be run on fake tensors is left out."""
        loss = closure() if closure is not None else None
        with self._in("optimizer"):
            try:
                type(optimizer).step(optimizer)
            except TooManyOperationsError:
                raise
            except Exception as error:  # noqa: BLE001 - anybody's optimizer
                self.optimizer_reason = f"the step of {type(optimizer).__name__} ({in_one_line(error)})"
            self.recorder.assign(tree_leaves(list(optimizer.state.values())), "optimizer")
        return loss


def _resized(tensor: Tensor, before: int, after: int, device: torch.device) -> Tensor:
    """An empty tensor like a batch's tensor, with `after` samples in place of `before`."""
    size, stride = list(tensor.shape), tensor.stride()
    if size and size[0] == before != after:
        size[0] = after
        if stride[0] < max(stride):  # the samples are not what is outermost in memory
            return torch.empty(size, dtype=tensor.dtype, device=device)
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
