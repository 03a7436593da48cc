"""From the rows of a run's record to works: which kind each operation is, and what a GPU computes in its place."""

from collections.abc import Iterator
from dataclasses import replace

from ..records.operations import OperationRow
from .work import Work

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


def works_of(row: OperationRow) -> Iterator[Work]:
    """The works that stand for a row; of a recurrent kernel its products and pointwise kernels, step by step."""
    base = row.name.partition(".")[2]
    kind = _KINDS.get(base, "elementwise" if not row.flops else "other")
    calls = max(row.calls, 1e-9)
    moved = row.bytes / calls * _PASSES.get(base, 1.0)
    dims = row.dims
    if kind == "linear" and len(dims) == 2:  # a matrix and a vector
        dims = (dims[0], 1, dims[1])
    if len(dims) != {"linear": 3, "bmm": 4, "recurrent": 4, "convolution": 7}.get(kind, 2):
        dims = ()
    work = Work(kind, row.name, dims, row.flops / calls, moved, calls, row.dtype, row.part, row.module)
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
