"""The operations of a training step as works: what a GPU computes for each, with its shape, as a prediction asks for it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import UserError
from ..hardware.datasheet import Datasheet
from ..records.operations import OperationRow

PRODUCTS = ("linear", "bmm", "convolution", "recurrent")
_KINDS = {
    **dict.fromkeys(("mm", "addmm", "_addmm_activation", "mv", "addmv"), "linear"),
    **dict.fromkeys(("bmm", "baddbmm"), "bmm"),
    **dict.fromkeys(("convolution", "_convolution", "convolution_backward"), "convolution"),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), "softmax"),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), "softmax"),
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward"), "layer_norm"),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn"), "recurrent"),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"), "recurrent"),
    **dict.fromkeys(("_to_copy", "clone", "copy", "copy_", "cat", "stack", "repeat", "constant_pad_nd"), "copy"),
}
# A batch norm needs the mean of all samples before it can write one, so it reads its inputs twice.
_PASSES = {"native_batch_norm": 1.5, "native_batch_norm_backward": 5 / 3}
_STAYS = ("softmax", "layer_norm")  # that autocast computes in float32
PRECISIONS = {"tf32": "tf32", "bf16-mixed": "bf16", "16-mixed": "fp16"}  # that a float32 step can be predicted in


@dataclass(frozen=True)
class Work:
    """One operation with this shape.

    Attributes:
        kind: `linear`, `bmm`, `elementwise`, `softmax`, `layer_norm`, `convolution`, `recurrent`, `copy`, `other`.
        name: `aten.addmm`; in the shared measurements `linear`, `add`, `powu`, …
        dims: linear (M, N, K); bmm (B, M, N, K); elementwise and rows (B, H); else ().
        flops: of one call.
        bytes: read and written by one call, each tensor once.
        calls: in a step.
        precision: `fp32`, `tf32`, `bf16`, `fp16`, `fp64`.
        part: `forward`, `backward`, `optimizer`.
    """

    kind: str
    name: str
    dims: tuple[int, ...]
    flops: float
    bytes: float
    calls: float = 1
    precision: str = "fp32"
    part: str = "forward"


def works_of(row: OperationRow) -> Iterator[Work]:
    """The works that stand for a row; of a recurrent kernel its products and pointwise kernels, step by step."""
    base = row.name.partition(".")[2]
    kind = _KINDS.get(base, "elementwise" if not row.flops else "other")
    calls = max(row.calls, 1e-9)
    moved = row.bytes / calls * _PASSES.get(base, 1.0)
    dims = row.dims
    if len(dims) != {"linear": 3, "bmm": 4, "recurrent": 4, "convolution": 7}.get(kind, 2):
        dims = ()
    work = Work(kind, row.name, dims, row.flops / calls, moved, calls, row.dtype, row.part)
    if kind == "recurrent" and dims and row.flops:
        yield from _unrolled(work)
    else:
        yield replace(work, dims=()) if kind == "convolution" else work


def _unrolled(work: Work) -> Iterator[Work]:
    """What a recurrent kernel over a whole sequence consists of: it cannot compute two time steps at the same time.

    T time steps of N samples with F features, H hidden units, and G numbers for each (four gates of an LSTM). Forward:
    one product with all inputs, and in each step one with the hidden state and one pointwise kernel. Backward: the same
    in reverse, and two products more for the gradients of the weights.
    """
    steps, samples, features, hidden = (max(1, size) for size in work.dims)
    products = 2 if work.part == "backward" or work.name.endswith("backward") else 1
    gates = max(1, round(work.flops / products / (2 * steps * samples * hidden * (features + hidden))))
    width, element = gates * hidden, 8 if work.precision == "fp64" else 4

    def product(m: int, n: int, k: int, calls: float) -> Work:
        moved = float(element * (m * k + k * n + m * n))
        return replace(
            work, kind="linear", dims=(m, n, k), flops=2.0 * m * n * k, bytes=moved, calls=calls * work.calls
        )

    pointwise = replace(work, kind="elementwise", dims=(samples, width), flops=0.0, calls=steps * work.calls)
    pointwise = replace(pointwise, bytes=float(element * samples * (width + 4 * hidden)))
    if products == 1:
        yield product(steps * samples, width, features, 1)
        yield product(samples, width, hidden, steps)
    else:
        yield product(steps * samples, features, width, 1)
        yield product(samples, hidden, width, steps)
        yield product(width, features, steps * samples, 1)
        yield product(width, hidden, steps * samples, 1)
    yield pointwise


def as_computed(work: Work, device: Datasheet, precision: str | None) -> Work:
    """A work as a card computes it; `precision`, one of `PRECISIONS`, takes the place of the float32 that was recorded.

    In float32 convolutions and recurrent kernels use TF32 where the card has it, which is torch's default, and matrix
    products do not.

    Raises:
        UserError: if the card has no hardware for the products' precision.
    """
    through_cudnn = work.kind == "convolution" or "rnn" in work.name
    is_product = work.kind in PRODUCTS or through_cudnn
    if precision in ("bf16-mixed", "16-mixed") and work.part != "optimizer" and work.kind not in _STAYS:
        work = replace(work, bytes=work.bytes / 2)
    if not is_product:
        return work
    if precision is not None:
        work = replace(work, precision=PRECISIONS[precision])
    elif work.precision == "fp32" and through_cudnn and "tf32" in device.flops_per_sec:
        work = replace(work, precision="tf32")
    if work.precision in ("tf32", "bf16", "fp16", "fp64") and work.precision not in device.flops_per_sec:
        raise UserError(f"has no hardware for {work.precision}")
    return work
