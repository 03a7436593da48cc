"""The FLOPs of an operation and of a sample, a multiply-add being two, and which operations do work of unknown size.

Matrix products, convolutions, attention and recurrent kernels count. Element-wise operations and the optimizer are left
out. Causal attention counts as if nothing were masked. Activation checkpointing counts as executed: recomputation is part of
the backward pass.

torch's registry (`torch.utils.flop_counter`) has products, convolutions and attention. `OURS` replaces what it counts
wrongly and adds what it does not know. A step with an operation whose work is unknown has no count.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from ..records.operations import OperationRow

_VARIES = 1.01  # between updates: larger factors are sequences of other lengths, or another network
Inputs = Mapping[str, Any]  # the arguments of an operation, by the names in its schema
_aten = torch.ops.aten
_SINGLE = ("fp32", "tf32")


class UncountableError(Exception):
    """The FLOPs of a step are not known. The message says why."""


def _convolution_backward(inputs: Inputs) -> int:
    """Each of the two gradients takes as many as the forward pass; torch's formula is wrong by a factor of `groups`."""
    x, weight, gradient = (list(inputs[name].shape) for name in ("input", "weight", "grad_output"))
    return sum(inputs["output_mask"][:2]) * conv_flop_count(x, weight, gradient, inputs["transposed"])


def _matrices(inputs: Inputs) -> list[list[Tensor]]:
    """The matrices of a recurrent kernel, for each layer and direction: of the input, and of the state."""
    if "weight0" in inputs:  # oneDNN's forward pass has one layer in one direction
        return [[inputs["weight0"], inputs["weight1"]]]
    if "weight1" in inputs:  # and its backward pass counts its weights from 1
        return [[inputs["weight1"], inputs["weight2"]]]
    weights: Sequence[Tensor] = inputs["weight"] if "weight" in inputs else inputs["params"]
    stride = inputs.get("weight_stride0") or len(weights) // (
        inputs["num_layers"] * (2 if inputs["bidirectional"] else 1)
    )
    groups = (weights[first : first + stride] for first in range(0, len(weights), stride))
    return [[weight for weight in group if weight.dim() == 2] for group in groups]


def _recurrent(inputs: Inputs) -> int:
    """Of a fused kernel over whole sequences: each time step of each sample meets each weight of a matrix once."""
    x, total = inputs["input"], 0
    for of_input, of_state in _matrices(inputs):  # a ValueError for an LSTM with projections
        total += 2 * (x.numel() // x.shape[-1]) * (of_input.numel() + of_state.numel())
    return total


def _recurrent_backward(inputs: Inputs) -> int:
    """Weights have a gradient at every step; so have the states but the first one, and the inputs but the first layer's.

    The first states and the first layer's inputs have one where something needs it: cuDNN is told so by its mask, and of
    other kernels the tensors tell, although they may compute all gradients.
    """
    x, hidden = inputs["input"], inputs["hx_"] if "hx_" in inputs else inputs["hx"]
    hidden = hidden[0] if isinstance(hidden, list | tuple) else hidden
    rows, first, groups = x.numel() // x.shape[-1], hidden.shape[-2], _matrices(inputs)
    mask = inputs.get("output_mask") or (x.requires_grad, hidden.requires_grad, False, None)
    total, directions = 0, 2 if len(groups) > 1 and inputs["bidirectional"] else 1
    for index, (of_input, of_state) in enumerate(groups):
        for matrix in (of_input, of_state):
            total += 2 * rows * matrix.numel() * (matrix.requires_grad if mask[3] is None else mask[3])
        total += 2 * rows * of_input.numel() * (index >= directions or mask[0])
        total += 2 * (rows if mask[1] else rows - first) * of_state.numel()
    return total


OURS: dict[Any, Callable[[Inputs], int]] = {
    # One operation on MPS; elsewhere they fall apart into products.
    _aten.linear: lambda inputs: 2 * inputs["input"].numel() * prod(inputs["weight"].shape[:-1]),
    _aten.linear_backward: lambda inputs: (
        2 * sum(inputs["output_mask"][:2]) * inputs["self"].numel() * inputs["weight"].shape[0]
    ),
    _aten.convolution_backward: _convolution_backward,
}
OURS[_aten._euclidean_dist] = lambda inputs: 2 * inputs["x1"].numel() * inputs["x2"].shape[-2]  # cdist of many rows
_FORWARD = ("mkldnn_rnn_layer", "_cudnn_rnn", "_lstm_mps")
_BACKWARD = ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "lstm_mps_backward")
OURS |= {getattr(_aten, name): _recurrent for name in _FORWARD}
OURS |= {getattr(_aten, name): _recurrent_backward for name in _BACKWARD}
_TORCHS = FlopCounterMode(display=False).flop_registry
_FLASH = "_scaled_dot_product_flash_attention"
for _ending in ("", "_backward"):  # of a CPU: not every version of torch counts it
    _TORCHS.setdefault(getattr(_aten, f"{_FLASH}_for_cpu{_ending}"), _TORCHS[getattr(_aten, f"{_FLASH}{_ending}")])
_TORCHS[_aten._scaled_dot_product_attention_math_for_mps] = _TORCHS[getattr(_aten, _FLASH)]

# Words in the names of torch's operations that do more than a few FLOPs an element: one without a formula is unknown.
_MULTIPLIES = "mm bmm hspmm smm addmm addbmm baddbmm sspaddmm matmul linear linalg rnn lstm gru attention transformer"
_MULTIPLIES += " conv conv1d conv2d conv3d convolution cdist pdist fft cholesky svd solve spsolve lstsq geqrf ormqr"
_MULTIPLIES += " orgqr trilinear mv addmv dot vdot"
# Words in those of them that do not: the gates of fused cells without their products, and what prepares a kernel.
_POINTWISE = "thnn flatten vector cross diagonal"
_HARMLESS = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")  # namespaces whose operations are known


def flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], inputs: Inputs, result: Any) -> int | None:
    """The FLOPs of a call, given its arguments, the same by name, and its result; 0 of an operation that multiplies nothing.

    None where they are not known: of a custom operation, of one of torch's products without a formula, and of products of
    sparse or nested tensors, whose shapes do not say how much is multiplied.
    """
    packet = func.overloadpacket
    if func.namespace == "aten":  # in place: as the operation that returns a new tensor
        packet = getattr(_aten, packet.__name__.removesuffix("_"), packet)
    if packet not in OURS and packet not in _TORCHS:
        return None if func.namespace not in _HARMLESS or _multiplies(packet.__name__) else 0
    given = (value for value in inputs.values() if isinstance(value, Tensor))
    if any(tensor.layout != torch.strided or tensor.is_nested for tensor in given):
        return None
    try:
        return OURS[packet](inputs) if packet in OURS else _TORCHS[packet](*args, **kwargs, out_val=result)
    except Exception:  # noqa: BLE001 - arguments that the formula does not know
        return None


@cache
def _multiplies(name: str) -> bool:
    words = {*name.split("_")}
    return not words.isdisjoint(_MULTIPLIES.split()) and words.isdisjoint(_POINTWISE.split())


def kind_of_product(name: str) -> str:
    """`matmul`, `convolution` or `recurrent`: the switch for TF32 that an operation with a formula obeys (`aten.addmm`)."""
    if name.removeprefix("aten.") in (*_FORWARD, *_BACKWARD):
        return "recurrent"
    return "convolution" if "conv" in name else "matmul"


def flops_per_sample(steps: Iterable[tuple[Iterable[OperationRow], float]]) -> tuple[float, dict[str, float]]:
    """The FLOPs of a sample, forward and backward, and the share of each kind of product in them: `matmul`, of float32 tensors;
    `matmul bf16` of others. Given recorded updates, each with its samples.

    Raises:
        UncountableError: for updates without a product, and where the updates differ, so that three of them say nothing
            about the others.
    """
    found = []
    for operations, samples in steps:
        kinds: defaultdict[str, float] = defaultdict(float)
        for each in operations:
            if each.flops and each.part in ("forward", "backward"):
                kind = kind_of_product(each.name)
                kinds[kind if each.dtype in _SINGLE else f"{kind} {each.dtype}"] += each.flops / samples
        found.append(kinds)
    if not any(found):
        raise UncountableError("its step has no matrix product, convolution or attention")
    totals = [sum(kinds.values()) for kinds in found]
    if max(totals) > _VARIES * min(totals):
        raise UncountableError("the recorded updates take different numbers of FLOPs a sample")
    return totals[-1], {kind: flops / totals[-1] for kind, flops in found[-1].items()}
