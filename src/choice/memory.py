"""The memory that a training needs on a device, by batch size: what was counted, and what a GPU adds to it.

The count (hardware/memory.py) has parameters, gradients, optimizer states, activations and the rest, for the device that
it was made on. The parts that grow with the batch do so on a line.

What is added on a GPU, in MiB:

- CUDA's context and the kernels that are loaded: 250 to 800. A tensor of one number took 723 with torch 1.4 (PyTorch forum,
  thread 73021); since CUDA 11.7 kernels are loaded when they are first used (CUDA C++ programming guide, lazy loading).
- cuBLAS's workspace: 8 to 32 (PyTorch's notes on CUDA, cuBLAS workspaces).
- the allocator's rounding: it takes memory in blocks of 2, 20 and more (PyTorch's notes on CUDA, memory management), and
  convolutions use workspaces that are not counted: 0 to 25 % of what was counted, an assumption.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .device import Device
from .scale import line
from .seconds import Interval

_MIB = 2**20
CONTEXT = Interval(258 * _MIB, 450 * _MIB, 832 * _MIB)  # with cuBLAS's workspace
ROUNDING = Interval(1.0, 1.08, 1.25)
MOST_OF_MEMORY = {"cuda": 0.97, "rocm": 0.97, "tpu": 0.97}  # what the driver leaves of the card's memory
OTHER_MEMORY = 0.75  # of a CPU's or an Apple chip's, which other programs use, too
LARGEST = 2**24


@dataclass(frozen=True)
class CountedMemory:
    """Bytes at the peak of a step on the device that was measured, by batch size."""

    fixed: float  # parameters, gradients and optimizer states
    by_size: Mapping[int, float]  # everything else
    is_counted: bool = True  # False: activations are taken from the traffic of the forward pass

    def at(self, batch_size: int) -> float:
        """Bytes at any batch size."""
        if len(self.by_size) == 1:
            size, rest = next(iter(self.by_size.items()))
            return self.fixed + rest * batch_size / size
        return self.fixed + line(self.by_size, batch_size)


def needed(counted: CountedMemory, device: Device, batch_size: int, element: float = 1.0) -> Interval:
    """Bytes that a step takes on a device.

    Args:
        counted: of the training.
        device: in question.
        batch_size: in question.
        element: the size of an activation's number relative to the counted one's: 0.5 in mixed precision.
    """
    rest = counted.at(batch_size) - counted.fixed
    bytes_ = Interval(*(counted.fixed + rest * share for share in _between(element, counted.is_counted)))
    if device.kind not in ("cuda", "rocm"):
        return bytes_
    return Interval(*(getattr(bytes_, end) * getattr(ROUNDING, end) for end in ("low", "middle", "high"))) + CONTEXT


def _between(element: float, is_counted: bool) -> tuple[float, float, float]:
    """Shares of the activations: in mixed precision some stay in float32; without a count they are known by a factor."""
    low, middle, high = element, min(1.0, element * 1.2), 1.0
    return (low, middle, high) if is_counted else (0.5 * low, middle, 1.6 * high)


def usable(device: Device) -> float:
    """Bytes of a device that one training may take."""
    return device.memory_bytes * MOST_OF_MEMORY.get(device.kind, OTHER_MEMORY)


def largest_batch(counted: CountedMemory, device: Device, element: float = 1.0, most: int = LARGEST) -> int:
    """The largest batch size whose step surely fits, the high end of what it needs; 0 if one sample does not."""
    room, low, high = usable(device), 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(counted, device, middle, element).high <= room else (low, middle - 1)
    return low
