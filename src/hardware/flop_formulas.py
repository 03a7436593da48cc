"""What counts as a FLOP: corrections of torch's formulas, the operations that have none, and FLOPs by kind of product."""

import contextlib
import re
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from .._torch import DispatchMode


class NotCountableError(Exception):
    """The step did something whose FLOPs are not known."""


class TooManyOperationsError(Exception):
    """The step has more operations than the limit."""


def _convolution_backward(
    grad_out: list[int], x: list[int], w: list[int], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Each of the two gradients takes as many as the forward pass; torch's formula is wrong by a factor of `groups`."""
    transposed, output_mask = args[4], args[7]
    return sum(output_mask[:2]) * conv_flop_count(x, w, grad_out, transposed)


def _product(a: list[int], b: list[int], **kwargs: Any) -> int:
    """Of a matrix and a vector, or of two vectors."""
    return 2 * prod(a)


def _recurrent(x: list[int], *weights: list[int], **kwargs: Any) -> int:
    """Of a fused kernel over a whole sequence: each time step of each sample meets each weight of a matrix once."""
    return 2 * prod(x[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


_aten = torch.ops.aten
# Replace what torch counts wrongly, and add what it does not count: products of vectors, and fused recurrent kernels.
FORMULAS = {
    _aten.convolution_backward: _convolution_backward,
    _aten.mv: _product,
    _aten.addmv: lambda bias, matrix, vector, **kwargs: _product(matrix, vector),
    _aten.dot: _product,
    _aten.vdot: _product,
    _aten.mkldnn_rnn_layer: lambda x, *rest, **kwargs: _recurrent(x, *rest[:4]),
    _aten.mkldnn_rnn_layer_backward: lambda x, *rest, **kwargs: 2 * _recurrent(x, *rest[:4]),
    _aten._cudnn_rnn: lambda x, weights, *rest, **kwargs: _recurrent(x, *weights),
    _aten._cudnn_rnn_backward: lambda x, weights, *rest, **kwargs: 2 * _recurrent(x, *weights),
}

# Operations of torch's own that do more than a few FLOPs an element and have no formula.
_UNKNOWN_WORK = re.compile(
    r".*mm(_v2)?_?"
    r"|.*(rnn|lstm|gru|attention|matmul|cdist|pdist|_fft_|cholesky|svd|spsolve|lstsq|geqrf|ormqr|orgqr|pack_mm).*"
    r"|_?linalg_(?!vector_norm|cross|diagonal).*|_trilinear|triangular_solve|lu_solve|.*conv(_|\d|olution).*"
    r"|(cudnn|miopen|mkldnn|mps|_mps|_nnpack|_sparse|quantized|fbgemm)_.*|_transformer_encoder_layer_fwd"
)
_POINTWISE = re.compile(r"_thnn_.*")  # the gates of fused cells, without their products
# torch's functions by the kind of product that they consist of.
_KINDS = {f"conv{transposed}{n}d": "convolution" for transposed in ("", "_transpose") for n in (1, 2, 3)}
_KINDS |= dict.fromkeys(("convolution", "_convolution"), "convolution")
_KINDS |= dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "recurrent")


def padding_share(func: Any, args: Any) -> float:
    """The share of a convolution's FLOPs that meet only the padding around the input, so that none has to be computed.

    0 for any other operation, and for transposed convolutions.
    """
    if func.overloadpacket is _aten.convolution:
        x, weight, rest = args[0], args[1], args[3:]
    elif func.overloadpacket is _aten.convolution_backward:
        x, weight, rest = args[1], args[2], args[4:]
    else:
        return 0.0
    *settings, transposed = rest[:4]
    number = x.dim() - 2
    stride, padding, dilation = (list(each) * number if len(each) == 1 else each for each in settings)
    if transposed or not any(padding):
        return 0.0
    dims = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return 1 - prod(map(_share_inside, *zip(*dims, strict=True)))


@cache
def _share_inside(size: int, kernel: int, stride: int, padding: int, dilation: int) -> float:
    """Along one dimension, the share of (output, weight) pairs whose input lies inside of the image."""
    outputs = range((size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)
    inside = sum(0 <= o * stride + k * dilation - padding < size for o in outputs for k in range(kernel))
    return inside / (len(outputs) * kernel)


class OperationGuard(DispatchMode):
    """Sees every operation after the counter, and ends a step that cannot be counted exactly.

    It also protects the original module: no operation on a tensor that has memory is let through. The operation that
    breaks a rule raises NotCountableError or TooManyOperationsError.
    """

    def __init__(self, formulas: Mapping[Any, Any], most_operations: int):
        super().__init__()
        self._formulas = formulas
        self._left = most_operations
        self._checked: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TooManyOperationsError
        for value in (*args, *(kwargs or {}).values()):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                    raise NotCountableError(f"{func} on a tensor that the copy does not own")
        if func not in self._checked:
            self._check(func)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any) -> None:
        name = func.overloadpacket.__name__
        is_known = func.namespace in ("aten", "prim", "prims", "profiler") and not _UNKNOWN_WORK.fullmatch(name)
        if not (is_known or func.overloadpacket in self._formulas or _POINTWISE.fullmatch(name)):
            raise NotCountableError(f"no formula for {func}")
        self._checked.add(func)


class FlopsByKind(TorchFunctionMode):
    """Adds up the FLOPs inside `backward()` and `autograd.grad()`, whoever calls them, and outside of these calls the
    FLOPs inside convolutions and recurrent kernels."""

    def __init__(self, counter: FlopCounterMode):
        super().__init__()
        self._counter = counter
        self.flops = {"backward": 0, "convolution": 0, "recurrent": 0}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_backward = func in (Tensor.backward, torch.autograd.grad)
        kind = "backward" if is_backward else _KINDS.get(getattr(func, "__name__", ""))
        if kind is None:
            return func(*args, **(kwargs or {}))
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))  # this mode is off meanwhile, so nested calls do not count twice
        self.flops[kind] += self._counter.get_total_flops() - before
        return result


class NoModules(contextlib.nullcontext):
    """In place of the counter's ModuleTracker, which counts by module and fails under `autograd.grad`."""

    parents = ("Global",)
