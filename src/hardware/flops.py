"""The FLOPs of an operation and of a sample (a multiply-add is two), and operations whose FLOPs are unknown.

Matrix products, convolutions, attention and recurrent kernels count. Element-wise operations and the optimizer do not
count. Causal attention counts as if nothing were masked. With activation checkpointing the executed operations count:
recomputation is part of the backward pass.

torch's registry (`torch.utils.flop_counter`) has products, convolutions and attention. `FORMULAS` replaces wrong formulas of
the registry, and adds missing ones. A step with an operation of unknown FLOPs has no count.
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

_MAX_RATIO = 1.01  # between updates: above it they differ in sequence length, or run other parts of the network
Inputs = Mapping[str, Any]  # arguments of an operation, by the names in its schema
_aten = torch.ops.aten
_FLOAT32 = ("fp32", "tf32")


class UncountableError(Exception):
    """The FLOPs of a step are unknown. The message says why."""


def _convolution_backward(inputs: Inputs) -> int:
    """Return the FLOPs: as many for each of two gradients as forward. torch's formula is wrong by a factor of `groups`."""
    x, weight, gradient = (list(inputs[name].shape) for name in ("input", "weight", "grad_output"))
    return sum(inputs["output_mask"][:2]) * conv_flop_count(x, weight, gradient, inputs["transposed"])


def _weight_matrices(inputs: Inputs) -> list[list[Tensor]]:
    """Return the two weight matrices, for input and state, of each layer and direction of a recurrent kernel."""
    if "weight0" in inputs:  # oneDNN's forward pass has one layer in one direction
        return [[inputs["weight0"], inputs["weight1"]]]
    if "weight1" in inputs:  # its backward pass counts weights from 1
        return [[inputs["weight1"], inputs["weight2"]]]
    weights: Sequence[Tensor] = inputs["weight"] if "weight" in inputs else inputs["params"]
    stride = inputs.get("weight_stride0") or len(weights) // (
        inputs["num_layers"] * (2 if inputs["bidirectional"] else 1)
    )
    groups = (weights[start : start + stride] for start in range(0, len(weights), stride))
    return [[weight for weight in group if weight.dim() == 2] for group in groups]


def _recurrent_forward(inputs: Inputs) -> int:
    """Return the FLOPs of a fused kernel over sequences: each time step of each sample uses each weight of a matrix once."""
    x, flops = inputs["input"], 0
    for input_weight, state_weight in _weight_matrices(inputs):  # ValueError for an LSTM with projections
        flops += 2 * (x.numel() // x.shape[-1]) * (input_weight.numel() + state_weight.numel())
    return flops


def _recurrent_backward(inputs: Inputs) -> int:
    """Return the FLOPs of the gradients of all weights, of all states except the first, and of all inputs above the first layer.

    The first states and the first layer's inputs count only if their gradients are needed. cuDNN's output mask says so. For other
    kernels `requires_grad` says so, although such a kernel may compute all gradients.
    """
    x, hidden = inputs["input"], inputs["hx_"] if "hx_" in inputs else inputs["hx"]
    hidden = hidden[0] if isinstance(hidden, list | tuple) else hidden
    rows, first_rows, groups = x.numel() // x.shape[-1], hidden.shape[-2], _weight_matrices(inputs)
    mask = inputs.get("output_mask") or (x.requires_grad, hidden.requires_grad, False, None)
    flops, directions = 0, 2 if len(groups) > 1 and inputs["bidirectional"] else 1
    for index, (input_weight, state_weight) in enumerate(groups):
        for matrix in (input_weight, state_weight):
            flops += 2 * rows * matrix.numel() * (matrix.requires_grad if mask[3] is None else mask[3])
        flops += 2 * rows * input_weight.numel() * (index >= directions or mask[0])
        flops += 2 * (rows if mask[1] else rows - first_rows) * state_weight.numel()
    return flops


FORMULAS: dict[Any, Callable[[Inputs], int]] = {
    # One operation on MPS; other devices decompose them into products.
    _aten.linear: lambda inputs: 2 * inputs["input"].numel() * prod(inputs["weight"].shape[:-1]),
    _aten.linear_backward: lambda inputs: (
        2 * sum(inputs["output_mask"][:2]) * inputs["self"].numel() * inputs["weight"].shape[0]
    ),
    _aten.convolution_backward: _convolution_backward,
}
FORMULAS[_aten._euclidean_dist] = lambda inputs: 2 * inputs["x1"].numel() * inputs["x2"].shape[-2]  # cdist of many rows
_FORWARD = ("mkldnn_rnn_layer", "_cudnn_rnn", "_lstm_mps")
_BACKWARD = ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "lstm_mps_backward")
FORMULAS |= {getattr(_aten, name): _recurrent_forward for name in _FORWARD}
FORMULAS |= {getattr(_aten, name): _recurrent_backward for name in _BACKWARD}
_REGISTRY = FlopCounterMode(display=False).flop_registry
_FLASH = "_scaled_dot_product_flash_attention"
for _ending in ("", "_backward"):  # on a CPU: not every version of torch counts it
    _REGISTRY.setdefault(getattr(_aten, f"{_FLASH}_for_cpu{_ending}"), _REGISTRY[getattr(_aten, f"{_FLASH}{_ending}")])
_REGISTRY[_aten._scaled_dot_product_attention_math_for_mps] = _REGISTRY[getattr(_aten, _FLASH)]

# Words in the names of operations with more than a few FLOPs an element: without a formula their FLOPs are unknown.
_COSTLY = "mm bmm hspmm smm addmm addbmm baddbmm sspaddmm matmul linear linalg rnn lstm gru attention transformer"
_COSTLY += " conv conv1d conv2d conv3d convolution cdist pdist fft cholesky svd solve spsolve lstsq geqrf ormqr"
_COSTLY += " orgqr trilinear mv addmv dot vdot"
# Words in such names of cheap operations: the gates of fused cells without their products, and the preparation of a kernel.
_CHEAP = "thnn flatten vector cross diagonal"
_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")  # other ones have custom operations


def count_flops(func: Any, args: Any, kwargs: Mapping[str, Any], inputs: Inputs, result: Any) -> int | None:
    """Return the FLOPs of a call, given its arguments, its arguments by name, and its result; 0 for an operation without products.

    None if they are unknown: for a custom operation, a torch product without a formula, and products of sparse or nested
    tensors, whose shapes do not determine the FLOPs.
    """
    packet = func.overloadpacket
    if func.namespace == "aten":  # an in-place operation counts as its out-of-place variant
        packet = getattr(_aten, packet.__name__.removesuffix("_"), packet)
    if packet not in FORMULAS and packet not in _REGISTRY:
        return None if func.namespace not in _NAMESPACES or _is_costly(packet.__name__) else 0
    input_tensors = (value for value in inputs.values() if isinstance(value, Tensor))
    if any(tensor.layout != torch.strided or tensor.is_nested for tensor in input_tensors):
        return None
    try:
        return FORMULAS[packet](inputs) if packet in FORMULAS else _REGISTRY[packet](*args, **kwargs, out_val=result)
    except Exception:  # noqa: BLE001 - arguments that the formula does not expect
        return None


@cache
def _is_costly(name: str) -> bool:
    words = {*name.split("_")}
    return not words.isdisjoint(_COSTLY.split()) and words.isdisjoint(_CHEAP.split())


def kind_of_product(name: str) -> str:
    """Return `matmul`, `convolution` or `recurrent`: the TF32 switch that a product (`aten.addmm`) obeys."""
    if name.removeprefix("aten.") in (*_FORWARD, *_BACKWARD):
        return "recurrent"
    return "convolution" if "conv" in name else "matmul"


def flops_per_sample(steps: Iterable[tuple[Iterable[OperationRow], float]]) -> tuple[float, dict[str, float]]:
    """Return the FLOPs of a sample, forward and backward, given recorded updates with their samples; and the share of each kind of
    product in them: `matmul` for float32 tensors, else `matmul bf16`.

    Raises:
        UncountableError: for updates without a product, and for updates that differ, so that they do not represent the others.
    """
    flops_by_step = []
    for operations, samples in steps:
        flops: defaultdict[str, float] = defaultdict(float)
        for row in operations:
            if row.flops and row.part in ("forward", "backward"):
                kind = kind_of_product(row.name)
                flops[kind if row.dtype in _FLOAT32 else f"{kind} {row.dtype}"] += row.flops / samples
        flops_by_step.append(flops)
    if not any(flops_by_step):
        raise UncountableError("its step has no matrix product, convolution or attention")
    totals = [sum(flops.values()) for flops in flops_by_step]
    if max(totals) > _MAX_RATIO * min(totals):
        raise UncountableError("the recorded updates take different numbers of FLOPs a sample")
    return totals[-1], {kind: flops / totals[-1] for kind, flops in flops_by_step[-1].items()}
