"""The memory that a training needs on a GPU, by batch size: what was measured, and what a GPU adds to it.

The record of a run has parameters, gradients, optimizer states, and what autograd saves, which grows with the batch
on a line. A GPU adds what the backward pass needs for a moment, the blocks of the allocator, the workspaces of
convolutions, and its context. The ends are the least and the most, and no interval of a confidence.
"""

from .interval import Interval

_MIB = 2**20
# CUDA's context with the kernels that are loaded (250 to 800 MiB: 723 with torch 1.4, PyTorch forum, thread 73021; less
# since CUDA 11.7, which loads them lazily, CUDA C++ programming guide), and cuBLAS's workspace (8 to 32 MiB, PyTorch's
# notes on CUDA).
CONTEXT = Interval(258 * _MIB, 450 * _MIB, 832 * _MIB)
USABLE = 0.97  # of a card's memory; the driver takes the rest
_BEYOND = (1.0, 1.2, 1.6)  # times what was counted: gradients of a moment, rounding and workspaces; assumed


def on_gpu(counted: float, is_peak: bool = False) -> Interval:
    """Bytes that a step takes on a GPU, at most: in a lower precision it takes less.

    `counted` are the bytes of parameters, gradients, optimizer states, and what autograd saves; or the peak of a GPU's allocator,
    which is the middle then.
    """
    most_likely = _BEYOND[1] if is_peak else 1.0
    return Interval(*(counted * times / most_likely for times in _BEYOND)) + CONTEXT
