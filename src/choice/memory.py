"""The memory that a training needs on a GPU: the bytes that a run has counted, and what a GPU adds to them.

The record of a run has the bytes of parameters, gradients, optimizer states, and the tensors that autograd saves, which grow
linearly with the batch. A GPU adds temporary tensors of the backward pass, the blocks of the allocator, the workspaces of
convolutions, and its context. The ends of an interval are the least and the most here; they have no confidence.
"""

from .interval import Interval

_MIB = 2**20
# CUDA's context with the kernels that are loaded (250 to 800 MiB: 723 with torch 1.4, PyTorch forum, thread 73021; less
# since CUDA 11.7, which loads them lazily, CUDA C++ programming guide), and cuBLAS's workspace (8 to 32 MiB, PyTorch's
# notes on CUDA).
CONTEXT = Interval(258 * _MIB, 450 * _MIB, 832 * _MIB)
USABLE = 0.97  # share of a card's memory; the driver takes the rest
_OVERHEAD_FACTORS = (1.0, 1.2, 1.6)  # of temporary gradients, rounding and workspaces; assumed


def estimate_gpu_bytes(counted_bytes: float, is_peak: bool = False) -> Interval:
    """Return the bytes that a step takes on a GPU; in a lower precision than the recorded one it takes less.

    `counted_bytes` are those of parameters, gradients, optimizer states and saved tensors. With `is_peak` they are the peak of a
    GPU's allocator, which is the middle then.
    """
    included_factor = _OVERHEAD_FACTORS[1] if is_peak else 1.0
    return Interval(*(counted_bytes * factor / included_factor for factor in _OVERHEAD_FACTORS)) + CONTEXT
