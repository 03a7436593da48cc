"""The memory of the training device: the bytes of training, the bytes that autograd saves, and out-of-memory errors."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch
from torch import Tensor

from .._torch import is_allocation_error
from .host_memory import host_memory
from .traffic import storages

# Texts that have other causes, too: they mean a lack of memory if less than this share of the device's memory is free.
_AMBIGUOUS = ("CUBLAS_STATUS_NOT_INITIALIZED", "unable to find an engine to execute this computation")
_FULL_SHARE = 0.05


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device or the host has no more memory."""
    if is_allocation_error(error):
        return True
    is_named = isinstance(error, RuntimeError) and any(words in str(error) for words in _AMBIGUOUS)
    is_ambiguous = is_named and torch.cuda.is_available()
    memory = shared_memory(torch.device("cuda")) if is_ambiguous else {}
    return bool(memory) and memory["free"] < _FULL_SHARE * memory["total"]


def training_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of a device's memory that training holds, now and at most; None for a device that does not report them.

    CUDA and AMD: the tensors in torch's allocator, and their peak since `torch.cuda.reset_peak_memory_stats`. MPS: the tensors,
    and the memory that Metal's driver holds for the process. The driver keeps freed memory, so this is an upper bound of the
    tensors' peak. CPU: the process's memory in RAM without mapped files (libraries), now for both numbers; a process that was forked
    after its imports counts as one that has imported by itself. The call does not wait for the device.
    """
    if device.type == "cuda":
        with suppress(RuntimeError):  # an allocator other than torch's
            # `torch.cuda.memory_stats` also flattens and sorts the hundred numbers of this call.
            if stats := torch.cuda.memory_stats_as_nested_dict(device):
                return stats["allocated_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["peak"]
        return None
    if device.type == "mps":
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    if device.type == "cpu":
        memory = psutil.Process().memory_info()
        anonymous_bytes = memory.rss - getattr(memory, "shared", 0)  # macOS and Windows do not report `shared`
        return anonymous_bytes, anonymous_bytes
    return None


def total_memory(device: torch.device) -> int:
    """Return the bytes of the memory that a device can use: on CUDA its own, on MPS Metal's recommended maximum, else the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return torch.mps.recommended_max_memory() if device.type == "mps" else host_memory().total


def shared_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes of a CUDA device: `free` for all processes, `total`, and `taken` by this process's allocator.

    Empty for other devices, and for an allocator that does not report them.
    """
    if device.type == "cuda":
        with suppress(RuntimeError, NotImplementedError):
            free, total = torch.cuda.mem_get_info(device)
            return {"free": free, "total": total, "taken": torch.cuda.memory_reserved(device)}
    return {}


def storage_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of the storages of tensors, each storage once; a sparse tensor shows no storage and does not count."""
    return sum({storage._cdata: storage.nbytes() for tensor in tensors for storage in storages(tensor)}.values())


class SavedTensors:
    """Counts the bytes of the tensors on a device that autograd saves: the most at one time, each storage once.

    It does not see tensors that a function keeps as attributes of its `ctx`, the interior of a region that activation
    checkpointing recomputes, and regions under other saved-tensor hooks.
    """

    def __init__(self, device: torch.device):
        self.most = 0
        self._device = device.type
        self._excluded: set[int] = set()  # keys of storages that do not count
        self._alive_storages: dict[int, tuple[int, weakref.ref]] = {}
        self._alive_bytes = 0

    @contextmanager
    def watch(self, others: Iterable[object]) -> Iterator[None]:
        """Watch a forward pass in this thread. The tensors in `others`, such as parameters and the batch, do not count.

        The step changes in one respect: autograd no longer reports a saved tensor that is later changed in place. Nothing is
        counted within `torch.func.grad` and similar functions, which refuse to run under such hooks.
        """
        self._excluded = {storage._cdata for value in others for storage in storages(value)}
        graph = torch.autograd.graph
        hooks, disable = graph.saved_tensors_hooks(self._pack, lambda saved: saved), graph.disable_saved_tensors_hooks

        @contextmanager
        def without_hooks(error_message: str) -> Iterator[None]:
            hooks.__exit__()
            graph.disable_saved_tensors_hooks = disable
            try:
                with disable(error_message):
                    yield
            finally:
                graph.disable_saved_tensors_hooks = without_hooks
                hooks.__enter__()

        with hooks:
            graph.disable_saved_tensors_hooks = without_hooks
            try:
                yield
            finally:
                graph.disable_saved_tensors_hooks = disable

    def _pack(self, tensor: Tensor) -> Tensor:
        for storage in storages(tensor):
            key = storage._cdata
            if storage.device.type != self._device or key in self._alive_storages or key in self._excluded:
                continue
            self._alive_storages[key] = storage.nbytes(), weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._alive_bytes += storage.nbytes()
            self.most = max(self.most, self._alive_bytes)
        return tensor.detach()  # saving the tensor itself would keep its autograd node alive

    def _forget(self, key: int) -> None:
        size, _ = self._alive_storages.pop(key)
        self._alive_bytes -= size
