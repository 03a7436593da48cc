"""The memory that a training needs on a device, by batch size: what was measured, and what a GPU adds to it.

A run's MemoryMonitor has parameters, gradients, optimizer states, and what autograd saves. What is saved grows with the
batch, on a line. So does what the backward pass needs for a moment, beside what is saved: the gradients that an operation
reads and writes. A run on a GPU has measured that, too, as the rest of its peak. For any other the operation that moves
most bytes stands for it. Two thirds of these bytes are such gradients, and the last third was saved; at the peak a part of
what was saved is freed already, so a third is the middle of it. Beside a count of every tensor of a step, parameters and
optimizer states left out, the middle was measured to be +10 % for the cnn, +11 % for a ResNet-18, +11 to +27 % for LSTMs, -19 %
for the mlp, and -42 to -48 % for the rnn_cell: where Python goes through the time steps, their gradients are all there at
once. There the high end is five thirds of these bytes.

What is added on a GPU, in MiB:

- CUDA's context and the kernels that are loaded: 250 to 800. A tensor of one number took 723 with torch 1.4 (PyTorch forum,
  thread 73021); since CUDA 11.7 kernels are loaded when they are first used (CUDA C++ programming guide, lazy loading).
- cuBLAS's workspace: 8 to 32 (PyTorch's notes on CUDA, cuBLAS workspaces).
- the allocator's rounding: it takes memory in blocks of 2, 20 and more (PyTorch's notes on CUDA, memory management), and
  convolutions use workspaces that are not known: 0 to 25 % of what was measured, an assumption.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .device import Device
from .scale import line
from .seconds import Interval

_MIB = 2**20
CONTEXT = Interval(258 * _MIB, 450 * _MIB, 832 * _MIB)  # with cuBLAS's workspace
ROUNDING = Interval(1.0, 1.08, 1.25)
MOST_OF_MEMORY = {"cuda": 0.97, "rocm": 0.97, "tpu": 0.97}  # what the driver leaves of the card's memory
OTHER_MEMORY = 0.75  # of a CPU's or an Apple chip's, which other programs use, too
LARGEST = 2**24
_FOR_A_MOMENT = (0.0, 1 / 3, 2 / 3)  # of what the largest operation of the backward pass moves
_IN_A_LOOP = (0.0, 1 / 3, 5 / 3)  # the same, where Python goes through the time steps


@dataclass(frozen=True)
class CountedMemory:
    """Bytes that a step holds on the device that was measured, by batch size."""

    fixed: float  # parameters, gradients and optimizer states
    by_size: Mapping[int, float]  # everything else
    is_counted: bool = True  # False: what is saved is taken from the traffic of the forward pass
    moving: Mapping[int, float] = field(default_factory=dict)  # by the largest operation of the backward pass
    has_loop: bool = False  # Python goes through the time steps

    def at(self, batch_size: int) -> float:
        """Bytes at any batch size, without what the backward pass needs for a moment."""
        return self.fixed + _at(self.by_size, batch_size)

    def moving_at(self, batch_size: int) -> float:
        """Bytes that the largest operation of the backward pass reads and writes; 0 where they are among the others."""
        return _at(self.moving, batch_size) if self.moving else 0.0


def _at(by_size: Mapping[int, float], batch_size: int) -> float:
    if len(by_size) == 1:
        size, known = next(iter(by_size.items()))
        return known * batch_size / size
    return line(by_size, batch_size)


def needed(counted: CountedMemory, device: Device, batch_size: int, element: float = 1.0) -> Interval:
    """Bytes that a step takes on a device.

    Args:
        counted: of the training.
        device: in question.
        batch_size: in question.
        element: the size of an activation's number relative to the counted one's: 0.5 in mixed precision.
    """
    rest, moving = counted.at(batch_size) - counted.fixed, counted.moving_at(batch_size)
    moments = _IN_A_LOOP if counted.has_loop else _FOR_A_MOMENT
    shares = zip(_between(element, counted.is_counted), moments, strict=True)
    bytes_ = Interval(*(counted.fixed + (rest + moment * moving) * share for share, moment in shares))
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
