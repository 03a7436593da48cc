"""What a step allocates and frees, and what is alive at its peak, seen on tensors without memory."""

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from .._torch import DispatchMode, storage_id
from .flop_formulas import TooManyOperationsError

PARTS = ("parameters", "gradients", "optimizer", "activations", "rest")

_aten = torch.ops.aten
_CUDA_BLOCK = 512  # bytes: what CUDA's allocator rounds an allocation up to
# Gates of a recurrent cell by cuDNN's number of its kind: RNN with ReLU and tanh, LSTM, GRU.
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


class AllocationRecorder(DispatchMode):
    """Notes, while it is active, when the storages of a device's tensors come and go.

    A new storage belongs to `rest`. It belongs to the activations if the forward pass makes it, or a recomputation in the
    backward pass, in which autograd is on. `assign` gives a storage to another part; what belongs to whom at the peak is
    settled at the end, so that a gradient is a gradient from its first moment.

    Args:
        device: others are not counted.
        most_operations: after these `LimitOperations` ends the step.
    """

    def __init__(self, device: torch.device, most_operations: int):
        super().__init__()
        self.stage = "before"  # before, forward, backward or optimizer: of the step
        self._device = device.type
        self._block = _CUDA_BLOCK if device.type == "cuda" else 1
        self._left = most_operations
        self._sizes: list[int] = []  # of the storages, by number
        self._parts: list[str] = []
        self._alive: dict[int, tuple[int, Any]] = {}  # identity of a storage → its number, and what tells of its end
        self._events: list[tuple[int, int, str]] = []  # number of a storage; 1 if it comes, -1 if it goes; the stage
        self._zeroed: int | None = None  # how many events there were at the first zero_grad

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self.stage == "optimizer" and func is _aten._local_scalar_dense.default:
            return 1.0  # a count of steps, which memory does not depend on
        result = func(*args, **(kwargs or {}))
        is_kept = self.stage == "forward" or (self.stage == "backward" and torch.is_grad_enabled())
        part = "activations" if is_kept else "rest"
        unseen = _reserve(func, args)
        for index, tensor in enumerate(result if isinstance(result, list | tuple) else (result,)):
            for each in tensor if isinstance(tensor, list | tuple) else (tensor,):
                if isinstance(each, Tensor):
                    self._note(each, part, unseen if index == 3 and not each.numel() else 0)
        return result

    @property
    def is_over(self) -> bool:
        """Whether there were more operations than allowed."""
        return self._left < 0

    def assign(self, tensors: Iterable[Any], part: str) -> None:
        """Say to which part the storages of these tensors belong."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and (number := self._note(tensor, part)) is not None:
                self._parts[number] = part

    def zero_grad(self) -> None:
        """Note that the gradients of the update before are freed here, if this is the first call."""
        if self._zeroed is None:
            self._zeroed = len(self._events)

    def _note(self, tensor: Tensor, part: str, unseen: int = 0) -> int | None:
        """The number of a tensor's storage; None if it is on another device."""
        if tensor.device.type != self._device:
            return None
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._alive:
            return self._alive[key][0]
        number = len(self._sizes)
        self._sizes.append(-(-(storage.nbytes() + unseen) // self._block) * self._block)
        self._parts.append(part)
        self._events.append((number, 1, self.stage))
        self._alive[key] = number, weakref.ref(storage, partial(self._freed, key, number))
        return number

    def _freed(self, key: int, number: int, reference: Any) -> None:
        del self._alive[key]
        self._events.append((number, -1, self.stage))

    def at_peak(self) -> tuple[str, Mapping[str, int]]:
        """The peak of any later step like this one: the stage that it lies in, and bytes by part.

        Such a step starts with the optimizer states that this one has made and, until its `zero_grad`, with the gradients
        that it has left.
        """
        left = {number for number, _ in self._alive.values()}
        states = {number for number in left if self._parts[number] == "optimizer"}
        gradients = sum(self._sizes[number] for number in left if self._parts[number] == "gradients")
        zeroed = self._zeroed or 0
        held = sum(self._sizes[number] for number in states)
        highest, peak = 0, 0
        for index, (number, change, _) in enumerate(self._events):
            held += 0 if number in states else change * self._sizes[number]
            total = held + (gradients if index < zeroed else 0)
            if total > highest:
                highest, peak = total, index
        parts = dict.fromkeys(PARTS, 0)
        parts["optimizer"] = sum(self._sizes[number] for number in states)
        parts["gradients"] = gradients if peak < zeroed else 0
        for number, change, _ in self._events[: peak + 1]:
            parts[self._parts[number]] += 0 if number in states else change * self._sizes[number]
        return self._events[peak][2] if self._events else self.stage, parts


class LimitOperations(TorchFunctionMode):
    """Raises TooManyOperationsError in the next call of a torch function once a recorder has seen too many operations.

    The recorder itself does not: an exception that it throws through torch's own code can abort the process.
    """

    def __init__(self, recorder: AllocationRecorder):
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recorder.is_over:
            raise TooManyOperationsError("more operations than can be followed")
        return func(*args, **(kwargs or {}))


def _reserve(func: Any, args: Any) -> int:
    """Bytes that a fused recurrent kernel keeps for its backward pass: torch's fake kernels return them with no size.

    oneDNN's are its own layout, as version 3 has it on a processor with AVX2. cuDNN does not document its layout; the
    gates, the cell state and its tanh are taken for it.
    """
    if func is _aten.mkldnn_rnn_layer.default:
        x, hidden = args[0], args[10]
        (steps, samples), features, gates = x.shape[:2], x.shape[2], _GATES[args[9]]
        widest = max(_leading(features), _leading(hidden))
        numbers = steps * (_leading(gates * hidden) + _leading(hidden)) + 2 * (steps + 1) * (3 * widest + 2 * hidden)
        return numbers * samples * x.element_size()
    if func is _aten._cudnn_rnn.default and args[12]:
        x, hidden, layers, directions = args[0], args[7], args[9], 2 if args[13] else 1
        samples = x.shape[0] if args[14] else x.shape[0] * x.shape[1]  # packed: (samples of all steps, features)
        return samples * hidden * layers * directions * (_GATES[args[6]] + 2) * x.element_size()
    return 0


def _leading(size: int) -> int:
    """The length of a row in oneDNN's workspace: a multiple of 64 bytes, and no multiple of 1 KiB."""
    padded = -(-size // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded
