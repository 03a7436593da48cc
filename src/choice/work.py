"""The operations of a training step as works: the kernels that a GPU runs for them, with shapes, as predictions take them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import UserError
from ..hardware.datasheet import Datasheet
from ..records.operations import OperationRow

_KINDS = {
    **dict.fromkeys(("mm", "addmm", "_addmm_activation"), "linear"),
    **dict.fromkeys(("bmm", "baddbmm"), "bmm"),
    **dict.fromkeys(("convolution", "_convolution", "convolution_backward"), "convolution"),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), "softmax"),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), "softmax"),
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward"), "layer_norm"),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn"), "recurrent"),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"), "recurrent"),
    **dict.fromkeys(("_to_copy", "clone", "copy", "copy_", "cat", "stack", "repeat", "constant_pad_nd"), "copy"),
}
# The numbers of dimensions that predictions can read, by kind; 2 for every other kind.
_NUM_DIMS = {"linear": (3,), "bmm": (4,), "recurrent": (4,), "convolution": (5, 7, 9)}
# A batch norm needs the mean of all samples before it can normalise one, so it reads its inputs twice.
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_TRAFFIC_FACTORS = {**dict.fromkeys(_BATCH_NORMS, 1.5), **{f"{name}_backward": 5 / 3 for name in _BATCH_NORMS}}
_STAY_FLOAT32 = ("softmax", "layer_norm")  # kinds that autocast computes in float32
PRECISIONS = {"tf32": "tf32", "bf16-mixed": "bf16", "16-mixed": "fp16"}  # in which a float32 step can be predicted


@dataclass(frozen=True)
class Work:
    """An operation of one shape, and its calls in a step."""

    kind: str  # `linear`, `bmm`, `elementwise`, `softmax`, `layer_norm`, `convolution`, `recurrent`, `copy`, `other`
    name: str  # `aten.addmm`; in the shared measurements `linear`, `add`, `powu`, …
    # linear (M, N, K); bmm (B, M, N, K); elementwise, softmax, layer_norm (B, H); convolution as in dims.py; else ()
    dims: tuple[int, ...]
    flops: float  # of one call
    bytes: float  # read and written by one call, each tensor once
    calls: float = 1  # in a step
    precision: str = "fp32"  # `fp32`, `tf32`, `bf16`, `fp16`, `fp64`
    part: str = "forward"  # `forward`, `backward`, `optimizer`


def expand_row(row: OperationRow) -> Iterator[Work]:
    """Yield the works of a row; a recurrent kernel yields its products and pointwise kernels, time step by time step."""
    base = row.name.partition(".")[2]
    kind = _KINDS.get(base, "elementwise" if not row.flops else "other")
    calls = max(row.calls, 1e-9)
    moved = row.bytes / calls * _TRAFFIC_FACTORS.get(base, 1.0)
    dims = row.dims if len(row.dims) in _NUM_DIMS.get(kind, (2,)) else ()
    work = Work(kind, row.name, dims, row.flops / calls, moved, calls, row.dtype, row.part)
    if kind == "recurrent" and dims and row.flops:
        yield from _unroll(work)
    else:
        yield work


def _unroll(work: Work) -> Iterator[Work]:
    """Yield the works of a recurrent kernel over whole sequences: it cannot compute two time steps at the same time.

    T time steps of N samples with F features, H hidden units, and G gates for each unit (four in an LSTM). The forward pass has
    one product with all inputs, and in each time step one product with the hidden state and one pointwise kernel. The backward
    pass has the same in reverse, and two more products for the gradients of the weights.
    """
    steps, samples, features, hidden = (max(1, size) for size in work.dims)
    is_backward = work.part == "backward" or work.name.endswith("backward")
    flops_per_gate = 2 * steps * samples * hidden * (features + hidden) * (2 if is_backward else 1)
    gates = max(1, round(work.flops / flops_per_gate))
    width, element = gates * hidden, {"fp64": 8, "bf16": 2, "fp16": 2}.get(work.precision, 4)
    products = [(steps * samples, width, features, 1), (samples, width, hidden, steps)]
    if is_backward:
        products = [(steps * samples, features, width, 1), (samples, hidden, width, steps)]
        products += [(width, features, steps * samples, 1), (width, hidden, steps * samples, 1)]
    for m, n, k, calls in products:
        moved, flops = float(element * (m * k + k * n + m * n)), 2.0 * m * n * k
        yield replace(work, kind="linear", dims=(m, n, k), flops=flops, bytes=moved, calls=calls * work.calls)
    moved = float(element * samples * (width + 4 * hidden))
    yield replace(work, kind="elementwise", dims=(samples, width), flops=0.0, bytes=moved, calls=steps * work.calls)


def adapt_to_device(work: Work, device: Datasheet, precision: str | None, recorded_on: str = "cpu") -> Work:
    """Return a work in the precision that a card computes it in; `precision`, one of `PRECISIONS`, replaces recorded float32.

    In float32, convolutions and recurrent kernels use TF32 if the card has it, and matrix products do not: these are torch's
    defaults. A work that was recorded on a GPU (`cuda`) keeps the recorded precision.

    Raises:
        UserError: if the card has no hardware for the products' precision.
    """
    through_cudnn = work.kind == "convolution" or "rnn" in work.name or "lstm" in work.name
    if precision in ("bf16-mixed", "16-mixed") and work.part != "optimizer" and work.kind not in _STAY_FLOAT32:
        work = replace(work, bytes=work.bytes / 2)
    if not work.flops and not through_cudnn:  # attention has FLOPs, and its kind is `other`
        return work
    if precision is not None:
        work = replace(work, precision=PRECISIONS[precision])
    elif work.precision == "fp32" and through_cudnn and recorded_on != "cuda" and "tf32" in device.flops_per_sec:
        work = replace(work, precision="tf32")
    elif work.precision == "tf32" and "tf32" not in device.flops_per_sec:  # a card without TF32 computes in float32
        work = replace(work, precision="fp32")
    if work.precision in ("tf32", "bf16", "fp16", "fp64") and work.precision not in device.flops_per_sec:
        raise UserError(f"has no hardware for {work.precision}")
    return work
