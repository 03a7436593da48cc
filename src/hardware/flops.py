"""Count the FLOPs of a training step without computing it.

A copy of the module runs its own `training_step` and `backward` once on meta tensors, which have shapes and no memory,
under torch's FlopCounterMode. The module itself, its trainer and the random states stay as they are.

Matrix products, convolutions and attention count, a multiply-add as two. Element-wise operations, the optimizer and
torchmetrics' metrics are left out. Causal attention counts as if nothing were masked. Activation checkpointing counts as
executed: recomputation is part of the backward pass.

torch's recurrent modules need no formula: on meta tensors nn.LSTM, nn.GRU and nn.RNN fall apart into the products that
the fused kernels compute. On a CPU or a GPU the counter would see one operation, and count nothing for it.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..errors import in_one_line
from .flop_formulas import FORMULAS, FlopsByKind, NoModules, OperationGuard, TooManyOperationsError
from .meta_copy import meta_copy

Flops = tuple[int, ...]  # forward; backward; of the forward ones those in convolutions, and in recurrent kernels

# An operation on meta tensors takes about 0.1 ms. A loop over cells that takes longer than 0.3 s is counted by its
# length, and a step that takes longer than half a minute is not counted.
_QUICK_OPERATIONS = 3_000
_MOST_OPERATIONS = 300_000
_SHORTEST_SEQUENCE = 64


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step, per sample.

    `recurrent` are those in torch's functions for whole sequences (`torch.lstm`, …), which a GPU runs by cuDNN. A network
    that is unrolled step by step consists of matrix products.
    """

    forward: float  # everything up to the loss
    backward: float  # fewer than twice the forward pass, since the first layer passes no gradient on
    convolution: float = field(default=0.0, compare=False)  # of the forward pass, in convolutions
    recurrent: float = field(default=0.0, compare=False)  # of the forward pass

    @property
    def total(self) -> float:
        """Forward and backward, without the optimizer."""
        return self.forward + self.backward

    @property
    def shares(self) -> dict[str, float]:
        """`matmul`, `convolution` and `recurrent` as fractions of the forward pass; the backward pass has the same."""
        convolution, recurrent = self.convolution / self.forward, self.recurrent / self.forward
        return {"matmul": 1 - convolution - recurrent, "convolution": convolution, "recurrent": recurrent}


class UncountableError(Exception):
    """The FLOPs of a step cannot be counted. The message says why."""


def count_step(module: LightningModule, batch: Any, batch_size: int | None = None) -> StepFlops:
    """Count the FLOPs of one training step of any LightningModule, with its present modes and frozen layers.

    The whole batch is counted: only that is exact for losses between samples, batch norm, and whatever else does not
    grow with the batch. A step of thousands of operations (a Python loop over cells) is counted at three short lengths
    of the sequence. If the three counts are exactly on a line, the line gives the count of the full length. Otherwise
    the whole is counted.

    Args:
        module: attached to a trainer or not.
        batch: what its `training_step` takes, on any device.
        batch_size: the samples in it; by default Lightning's rule, the first dimension of the first tensor.

    Raises:
        UncountableError: for a step that depends on the data (`.item()`, `nonzero`, an `if` on a tensor), does work of
            unknown size (custom kernels, FFTs, decompositions), has no products, or cannot be copied. Nothing else.
    """
    counts: Flops = (0,)
    size, failure = 1, None
    with without_side_effects():  # which an exception would leave in place
        try:
            size = batch_size or extract_batch_size(batch)
            counts = _count_quickly(module, batch, size)
        except Exception as error:  # noqa: BLE001 - anybody's step, on tensors that it was not written for
            failure = error
    if failure is not None:
        raise UncountableError(in_one_line(failure)) from failure
    if not counts[0]:
        raise UncountableError("its forward pass has no matrix product, convolution or attention")
    return StepFlops(*(count / size for count in counts))


@contextlib.contextmanager
def without_side_effects() -> Iterator[None]:
    """Restore the random states, hide warnings about meta tensors, compile nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=torch.cuda.is_initialized()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:  # its import takes seconds, and a program that compiles has done it
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _count_quickly(module: LightningModule, batch: Any, batch_size: int) -> Flops:
    length = sequence_length(batch, batch_size)
    if length is None:
        return _count(module, batch, _MOST_OPERATIONS)
    try:
        return _count(module, batch, _QUICK_OPERATIONS)
    except TooManyOperationsError:
        return _count_by_length(module, batch, length) or _count(module, batch, _MOST_OPERATIONS)


def _count(module: LightningModule, batch: Any, most_operations: int, cut: tuple[int, int] | None = None) -> Flops:
    """Run one step of a copy; `cut=(T, t)` shortens sequences from T to t steps."""
    twin, batch = meta_copy(module, batch)
    if cut:
        batch = apply_to_collection(batch, Tensor, shortened, *cut)
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    cast(Any, counter).mod_tracker = NoModules()
    by_kind = FlopsByKind(counter)
    guard = OperationGuard(counter.flop_registry, most_operations)
    arguments = (batch, 0) if is_param_in_hook_signature(twin.training_step, "batch_idx", min_args=2) else (batch,)
    with torch.inference_mode(False), torch.enable_grad(), torch.device("meta"), guard, counter, by_kind:
        result: Any = twin.training_step(*arguments)
        if twin.automatic_optimization:
            twin.backward(result["loss"] if isinstance(result, Mapping) else result)
    backward = by_kind.flops["backward"]
    return counter.get_total_flops() - backward, *by_kind.flops.values()


def _count_by_length(module: LightningModule, batch: Any, length: int) -> Flops | None:
    """Extend the counts at three short lengths to the real one, if the three are on a line; else None.

    The short lengths leave the same remainder as the real one, so that a stride of 2, 4 or 8 rounds alike.
    """
    lengths = [length % 8 + base for base in (8, 16, 40)]
    try:
        counts = [_count(module, batch, _MOST_OPERATIONS, (length, short)) for short in lengths]
    except Exception:  # noqa: BLE001 - a model that takes one length only
        return None
    extended = tuple(extrapolated(lengths, parts, length) for parts in zip(*counts, strict=True))
    return None if None in extended else cast(Flops, extended)


def sequence_length(batch: Any, batch_size: int) -> int | None:
    """The longest of the first two dimensions of the batch's tensors, if it can only be time."""
    lengths: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: lengths.extend(tensor.shape[:2] if tensor.dim() > 1 else ()))
    longest = max((length for length in lengths if length != batch_size), default=0)
    return longest if longest >= _SHORTEST_SEQUENCE else None


def shortened(tensor: Tensor, length: int, short: int) -> Tensor:
    """A tensor of the batch, with `short` steps in place of `length`."""
    for dim in range(min(2, tensor.dim())):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, 0, short)
    return tensor


def extrapolated(lengths: list[int], counts: tuple[int, ...], length: int) -> int | None:
    """The count at `length` of the line through three points; None if they are on none."""
    (first, second, third), (a, b, c) = lengths, counts
    slope, remainder = divmod(b - a, second - first)
    if remainder or c != a + slope * (third - first):
        return None
    return a + slope * (length - first)
