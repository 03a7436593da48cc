"""What the host takes for a step on a GPU: Python, the framework, and a launch for each operation.

The host does this at the same rate for every GPU, so it bounds small models. Two parts are told apart:

- what the training loop, Python and autograd take beside the operations. A CPU's run has measured it: the step without
  its operations. It is the same code on a GPU; only the host is another. It is a difference of two larger times, and known
  no better than the step. It is held between what is usual at least and at most.
- what a launched operation takes below that: the dispatcher, the allocator, the library, the driver. Published values:
  a launch of an empty kernel alone takes 2 to 4 µs (NVIDIA, Getting Started with CUDA Graphs, 2019); `x * x` on one number
  takes about 2 µs of Python and dispatch, and an operation with a number and autograd 7 (pytorch issue 41383, 2020); an
  addition of two tensors on an A100 takes 8 µs in all where many are issued in a row (Torch-FL pull request 27, 2026).

Convolutions, batch norms and recurrent kernels also go through cuDNN, and count as several operations. Published: a step of a
ResNet-50 takes 30 ms where launches limit it, on a V100 at batch 1 to 4 (pytorch/benchmark pull request 706, 2022: three steps
take 89 to 94 ms). About a quarter of it is an Adam that launches for each parameter. What is left is 20 ms for 53 convolutions
and as many batch norms, forward and backward: some 60 µs for each on a host of 2017.
"""

from collections.abc import Sequence

from ..records.operations import OperationRow
from .interval import Interval, converted

_ASSUMED = 0.8  # the confidence of the intervals below, which follow from the published values
# Seconds of a simple operation on the host of a GPU: dispatch and launch; and at most, with Python and autograd above it.
BELOW_AUTOGRAD = converted(3e-6, 5e-6, 9e-6, _ASSUMED)
MOST_WHOLE_OPERATION = 15e-6
# Another processor's time for the same Python, relative to this one's. Assumed; those of five hosts that were measured are 0.75 to
# 1.8 times as long as the median of the others (benchmarks/results/held_out.md).
OTHER_HOST = Interval(0.5, 1.0, 2.0)
LEAST_BESIDE = 8e-6  # seconds of Python and autograd for an operation
MOST_LOOP, MOST_BESIDE = 5e-3, 50e-6  # seconds of the loop for a step, and for an operation
THROUGH_CUDNN = 8.0  # simple operations that one of these is worth
_CUDNN = ("conv", "batch_norm", "rnn")


def launched(rows: Sequence[OperationRow]) -> float:
    """The launches of a step, as so many simple operations."""
    return sum(row.calls * (THROUGH_CUDNN if any(name in row.name for name in _CUDNN) else 1.0) for row in rows)


def elsewhere(seconds: Interval) -> Interval:
    """What was measured on the processor here, on the host of a GPU."""
    return Interval(*(here * other for here, other in zip(seconds.ends(), OTHER_HOST.ends(), strict=True)))
