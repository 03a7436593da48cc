"""FLOPs and bytes of single operations on paper, beside what OperationRecorder counts for them.

Bytes are those of the tensors that are read and written, in float32, without a cache. Elementwise operations and
optimizers have no FLOPs, by definition: only products count.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from batchscope.hardware.operations import OperationRecorder

F32 = 4  # bytes


class Work(NamedTuple):
    flops: float
    bytes: float


def counted(run: Callable[[], object]) -> Work:
    """What the recorder counts for a call, after a call that makes what stays."""
    run()
    with OperationRecorder() as recorder:
        run()
    if recorder.error is not None:
        raise recorder.error
    return Work(*(sum(getattr(each, of) for each in recorder.operations()) for of in ("flops", "bytes")))


def compared() -> Iterator[tuple[str, Work, Work]]:
    """Name, counted, on paper."""
    yield from _linear(batch=32, fan_in=256, fan_out=128)
    yield from _convolution(batch=4, c_in=8, c_out=16, size=12)
    yield "LSTM, forward, without gradients", *_lstm(batch=4, steps=10, features=16, hidden=32)
    yield from _elementwise(1000)
    for kind, bytes_a_weight, bytes_of_steps in (("fused", 28, 12), ("foreach", 76, 12), ("for-loop", 76, 8)):
        yield f"Adam, {kind}", *_adam(10_000, kind, bytes_a_weight, bytes_of_steps)


def _linear(batch: int, fan_in: int, fan_out: int) -> Iterator[tuple[str, Work, Work]]:
    layer, x = nn.Linear(fan_in, fan_out), torch.randn(batch, fan_in, requires_grad=True)
    gradient = torch.randn(batch, fan_out)
    inputs, weights, outputs = batch * fan_in, fan_in * fan_out, batch * fan_out
    product = 2.0 * batch * fan_in * fan_out
    forward = Work(product, F32 * (inputs + weights + fan_out + outputs))
    # A product for each of the two gradients, and a sum for the bias's.
    both = Work(2 * product, F32 * (2 * (inputs + weights + outputs) + outputs + fan_out))
    with torch.no_grad():
        yield "linear, forward", counted(lambda: layer(x)), forward
    y = layer(x)
    yield "linear, backward", counted(_backward(y, [x, *layer.parameters()], gradient)), both


def _convolution(batch: int, c_in: int, c_out: int, size: int) -> Iterator[tuple[str, Work, Work]]:
    layer, x = nn.Conv2d(c_in, c_out, 3, padding=1), torch.randn(batch, c_in, size, size, requires_grad=True)
    gradient = torch.randn(batch, c_out, size, size)
    inputs, outputs, weights = batch * c_in * size**2, batch * c_out * size**2, 9 * c_in * c_out
    product = 2.0 * batch * size**2 * weights
    forward = Work(product, F32 * (inputs + weights + c_out + outputs))
    # One operation: it reads gradient, input and weights, and writes the gradients of input, weights and bias.
    both = Work(2 * product, F32 * (outputs + 2 * (inputs + weights) + c_out))
    with torch.no_grad():
        yield "convolution, forward", counted(lambda: layer(x)), forward
    y = layer(x)
    yield "convolution, backward", counted(_backward(y, [x, *layer.parameters()], gradient)), both


def _lstm(batch: int, steps: int, features: int, hidden: int) -> tuple[Work, Work]:
    layer, x = nn.LSTM(features, hidden).eval(), torch.randn(steps, batch, features)
    states = (torch.zeros(1, batch, hidden), torch.zeros(1, batch, hidden))
    weights = 4 * hidden * (features + hidden)
    # The kernel reads and writes a hidden and a cell state; then nn.LSTM stacks those of all layers, which copies both.
    moved = steps * batch * (features + hidden) + weights + 2 * 4 * hidden + (4 + 4) * batch * hidden
    with torch.no_grad():
        return counted(lambda: layer(x, states)), Work(2.0 * steps * batch * weights, F32 * moved)


def _elementwise(size: int) -> Iterator[tuple[str, Work, Work]]:
    x, y = torch.randn(size), torch.randn(size)
    yield "x · y", counted(lambda: x * y), Work(0, F32 * 3 * size)
    yield "relu(x)", counted(lambda: torch.relu(x)), Work(0, F32 * 2 * size)
    yield "x.mul_(2)", counted(lambda: x.mul_(2)), Work(0, F32 * 2 * size)
    yield "x.copy_(y)", counted(lambda: x.copy_(y)), Work(0, F32 * 2 * size)


def _adam(size: int, kind: str, bytes_a_weight: int, bytes_of_steps: int) -> tuple[Work, Work]:
    """Fused: reads weight, gradient and two moments, writes all but the gradient. Otherwise 7 passes, 76 bytes a weight.

    The passes: lerp of the first moment (12), product (8) and addcmul (16: the gradient is an argument twice) of the
    second, its root (8), division (8) and sum (8), and addcdiv of the weight (16). The counter of steps is one more
    number, which is read and written, and read once more by the fused kernel or by the foreach sum (its summand).
    """
    weight = nn.Parameter(torch.randn(size))
    weight.grad = torch.randn(size)
    optimizer = torch.optim.Adam([weight], foreach=kind == "foreach", fused=kind == "fused")
    return counted(optimizer.step), Work(0, bytes_a_weight * size + bytes_of_steps)


def _backward(output: torch.Tensor, inputs: list[torch.Tensor], gradient: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def table() -> tuple[str, dict]:
    """A table of `compared`, and its numbers."""
    lines = ["| operation | FLOPs: counted | on paper | bytes: counted | on paper |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    data = {}
    for name, found, paper in compared():
        lines.append(f"| {name} | {found.flops:,.0f} | {paper.flops:,.0f} | {found.bytes:,.0f} | {paper.bytes:,.0f} |")
        data[name] = {"counted": found._asdict(), "on_paper": paper._asdict()}
    return "\n".join(lines), data
