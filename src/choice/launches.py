"""The host's time for a step on a GPU: Python, the framework, and a launch for each operation.

The host takes the same time for every GPU, so it bounds small models. It has two parts:

- The training loop, Python and autograd. A run on a CPU has measured their time: the step without its operations. A GPU's host
  runs the same code, but may be another processor. The time is a difference of two larger ones, so it is known no better than
  the step. It is clipped to what is usual at least and at most.
- The launch of an operation below autograd: the dispatcher, the allocator, the library, the driver. Published values:
  a launch of an empty kernel alone takes 2 to 4 µs (NVIDIA, Getting Started with CUDA Graphs, 2019); `x * x` on one number
  takes about 2 µs of Python and dispatch, and an operation with a number and autograd 7 (pytorch issue 41383, 2020); an
  addition of two tensors on an A100 takes 8 µs in all where many are issued in a row (Torch-FL pull request 27, 2026).

Convolutions, batch norms and recurrent kernels also go through cuDNN, and count as several operations. Published: a step of a
ResNet-50 takes 30 ms where launches limit it, on a V100 at batch 1 to 4 (pytorch/benchmark pull request 706, 2022: three steps
take 89 to 94 ms). An Adam that launches for each parameter takes about a quarter of it. The rest is 20 ms for 53 convolutions
and 53 batch norms, forward and backward: some 60 µs for each on a host of 2017.
"""

from collections.abc import Sequence

from ..records.operations import OperationRow
from .interval import Interval, convert_interval

_ASSUMED_CONFIDENCE = 0.8  # the confidence of the intervals below, which follow from the published values
# Seconds of a simple operation on the host of a GPU: dispatch and launch alone, and the most with Python and autograd.
BELOW_AUTOGRAD = convert_interval(3e-6, 5e-6, 9e-6, _ASSUMED_CONFIDENCE)
MOST_OPERATION_S = 15e-6
# Another host's time for the same Python code, relative to this host's. Assumed. Of five measured hosts, each took 0.75 to 1.8
# times as long as the median of the others (benchmarks/results/held_out.md).
OTHER_HOST = Interval(0.5, 1.0, 2.0)
AUTOGRAD_S = (8e-6, 50e-6)  # of Python and autograd for an operation: the least and the most
MOST_LOOP_S = 5e-3  # of the training loop for a step
THROUGH_CUDNN = 8.0  # the host's time for a cuDNN operation, in simple operations
_CUDNN_NAMES = ("conv", "batch_norm", "rnn")


def count_launches(rows: Sequence[OperationRow]) -> float:
    """Return the launches of a step, in units of a simple operation's launch."""
    return sum(row.calls * (THROUGH_CUDNN if any(name in row.name for name in _CUDNN_NAMES) else 1.0) for row in rows)


def on_other_host(seconds: Interval) -> Interval:
    """Return the time on the host of a GPU for a time that was measured on the processor here."""
    return Interval(*(here_s * factor for here_s, factor in zip(seconds.ends(), OTHER_HOST.ends(), strict=True)))
