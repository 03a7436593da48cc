"""The memory of the device that trains: what training holds, what autograd saves, and whether an error says it is full."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch
from torch import Tensor

from .host_memory import host_memory
from .traffic import storages

# In any other RuntimeError. cuBLAS and cuDNN report the lack of memory for their own buffers by a status.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OUT_OF_MEMORY += ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",)
# What libraries say as well for other reasons: it is the memory where less than this share of the device's is free.
_PERHAPS = ("CUBLAS_STATUS_NOT_INITIALIZED", "unable to find an engine to execute this computation")
_FULL = 0.05


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host has no more memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if any(words in said for words in _OUT_OF_MEMORY):
        return True
    memory = shared_memory(torch.device("cuda")) if torch.cuda.is_available() and any(map(said.count, _PERHAPS)) else {}
    return bool(memory) and memory["free"] < _FULL * memory["total"]


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a device's memory that training holds, now and at most; None for a device that does not tell.

    CUDA and AMD: the tensors in torch's allocator, and their peak since `torch.cuda.reset_peak_memory_stats`. MPS: the same
    tensors, and what Metal's driver holds for the process, which keeps what was freed: the peak of the tensors is at most
    that. CPU: the process's memory in RAM without mapped files (libraries), which keeps no peak; a process that was forked after
    its imports counts as one that has imported by itself. Asking waits for nothing.
    """
    if device.type == "cuda":
        with suppress(RuntimeError):  # of another allocator than torch's
            # One call of the allocator: `torch.cuda.memory_stats` flattens and sorts its hundred numbers.
            if stats := torch.cuda.memory_stats_as_nested_dict(device):
                return stats["allocated_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["peak"]
        return None
    if device.type == "mps":
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    if device.type == "cpu":
        memory = psutil.Process().memory_info()
        held = memory.rss - getattr(memory, "shared", 0)  # which macOS and Windows do not report
        return held, held
    return None


def total_memory(device: torch.device) -> int:
    """Bytes of the memory that a device can use: its own; on MPS what Metal recommends at most; else the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return torch.mps.recommended_max_memory() if device.type == "mps" else host_memory().total


def shared_memory(device: torch.device) -> dict[str, int]:
    """Bytes of a CUDA device that are `free` for all processes, its `total`, and what this process's tensors have `taken`.

    Empty for other devices, and where an allocator does not say.
    """
    if device.type == "cuda":
        with suppress(RuntimeError, NotImplementedError):
            free, total = torch.cuda.mem_get_info(device)
            return {"free": free, "total": total, "taken": torch.cuda.memory_reserved(device)}
    return {}


def bytes_of(tensors: Iterable[object]) -> int:
    """Bytes of the storages of tensors, each storage once; a sparse tensor, which shows none, does not count."""
    return sum({storage._cdata: storage.nbytes() for each in tensors for storage in storages(each)}.values())


class SavedTensors:
    """Bytes of the tensors on a device that autograd saves: the most that existed at one time, each storage once.

    Not seen are tensors that a function keeps as attributes of its `ctx`, the interior of a region that activation
    checkpointing computes again, and regions under saved-tensor hooks of their own.
    """

    def __init__(self, device: torch.device):
        self.most = 0
        self._device = device.type
        self._others: set[int] = set()  # storages that are no part of it
        self._alive: dict[int, tuple[int, weakref.ref]] = {}
        self._held = 0

    @contextmanager
    def watch(self, others: Iterable[object]) -> Iterator[None]:
        """Watch a forward pass in this thread. The tensors among `others`, such as parameters and the batch, do not count.

        The step does not change, but for two things: a saved tensor that is then changed in place is not reported, and
        nothing is seen within `torch.func.grad` and its kind, which refuse to run under such hooks.
        """
        self._others = {storage._cdata for each in others for storage in storages(each)}
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

    def _pack(self, saved: Tensor) -> Tensor:
        for storage in storages(saved):
            key = storage._cdata
            if storage.device.type != self._device or key in self._alive or key in self._others:
                continue
            self._alive[key] = storage.nbytes(), weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._held += storage.nbytes()
            self.most = max(self.most, self._held)
        return saved.detach()  # the tensor itself would keep its own node alive

    def _forget(self, key: int) -> None:
        size, _ = self._alive.pop(key)
        self._held -= size
