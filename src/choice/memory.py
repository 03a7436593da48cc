"""The memory that a training needs on a GPU, by batch size: what was measured, and what a GPU adds to it.

A run's MemoryMonitor has parameters, gradients, optimizer states, and what autograd saves, which grows with the batch
on a line. So does what the backward pass needs for a moment: the gradients that an operation reads and writes. A run on
a GPU has measured that as the rest of its peak. For any other the operation that moves most bytes stands for it: a
third of these bytes is the middle, as a count of every tensor of a step showed (+10 % for the cnn, +11 % for a
ResNet-18, +27 % for LSTMs, -19 % for the mlp). Where Python goes through the time steps, all their gradients are there
at once: five thirds of these bytes held the rnn_cell, and are the high end for all. The ends are the least and the
most, and no interval of a confidence.
"""

from .interval import Interval

_MIB = 2**20
# CUDA's context with the kernels that are loaded (250 to 800 MiB: 723 with torch 1.4, PyTorch forum, thread 73021; less
# since CUDA 11.7, which loads them lazily, CUDA C++ programming guide), and cuBLAS's workspace (8 to 32 MiB, PyTorch's
# notes on CUDA).
CONTEXT = Interval(258 * _MIB, 450 * _MIB, 832 * _MIB)
USABLE = 0.97  # of a card's memory; the driver takes the rest
# Of the allocator's blocks (PyTorch's notes on CUDA) and convolutions' workspaces; assumed.
_ROUNDING = (1.0, 1.08, 1.25)
_FOR_A_MOMENT = (0.0, 1 / 3, 5 / 3)  # of what the largest operation of the backward pass moves


def on_gpu(counted: float, moving: float) -> Interval:
    """Bytes that a step takes on a GPU, at most: in a lower precision it takes less.

    Args:
        counted: bytes of parameters, gradients, optimizer states, and what autograd saves.
        moving: bytes that the largest operation of the backward pass moves; 0 where they were counted.
    """
    shares = zip(_FOR_A_MOMENT, _ROUNDING, strict=True)
    return Interval(*((counted + moment * moving) * rounding for moment, rounding in shares)) + CONTEXT
