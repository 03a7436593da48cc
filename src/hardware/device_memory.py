"""The memory of the device that trains: what training holds, what autograd saves, and whether an error says it is full."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from .._torch import saved_tensors, storage_id
from .host_memory import peak_rss, private_rss
from .traffic import storages

ALLOCATED = "device/memory_allocated_gib"
PEAK = "device/memory_peak_gib"
RESERVED = "device/memory_reserved_gib"  # CUDA and AMD
_IN_ALLOCATOR = {
    ALLOCATED: ("allocated_bytes", "current"),
    PEAK: ("allocated_bytes", "peak"),
    RESERVED: ("reserved_bytes", "peak"),
}
_GIB = 2**30

# In any other RuntimeError. cuBLAS and cuDNN report the lack of memory for their own buffers by a status.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OUT_OF_MEMORY += ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host has no more memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


class MemoryReadings:
    """GiB of the device's memory that training holds, now and at most. Reading them waits for nothing.

    CUDA and AMD: the tensors in torch's allocator, their peak since this was made, validation included, and the peak of
    what the allocator has reserved for them on the device. MPS: the same tensors, and their highest reading. CPU: the
    process's memory in RAM without the libraries' files, and its highest reading. Any other device has no readings.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._process = psutil.Process()
        self._peak = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def __call__(self) -> dict[str, float]:
        """The readings by metric."""
        if self._device.type == "cuda":
            # One call of the allocator: `torch.cuda.memory_stats` flattens and sorts its hundred numbers.
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            return {key: stats[kind]["all"][which] / _GIB for key, (kind, which) in _IN_ALLOCATOR.items() if stats}
        if self._device.type == "mps":
            held = torch.mps.current_allocated_memory() / _GIB
        elif self._device.type == "cpu":
            held = private_rss(self._process) / _GIB
        else:
            return {}
        self._peak = max(self._peak, held)
        return {ALLOCATED: held, PEAK: self._peak}


def measured_bytes(device: torch.device) -> dict[str, int]:
    """The peaks that the device itself tells of its memory; empty for a device that tells none, such as MPS.

    CUDA: `allocated`, the most that tensors have held, and `reserved`, the most that torch's allocator has taken from the
    device for them. CPU: `process_peak`, the most that the process has had in RAM.
    """
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"process_peak": peak_rss()} if device.type == "cpu" else {}


def bytes_of(tensors: Iterable[object]) -> int:
    """Bytes of the storages of tensors, each storage once."""
    return sum({storage_id(storage): storage.nbytes() for each in tensors for storage in storages(each)}.values())


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
        """Watch a forward pass in this thread. The tensors among `others`, such as parameters and the batch, do not count."""
        self._others = {storage_id(storage) for each in others for storage in storages(each)}
        with saved_tensors(self._note):
            yield

    def _note(self, saved: Tensor) -> None:
        for storage in storages(saved):
            key = storage_id(storage)
            if storage.device.type != self._device or key in self._alive or key in self._others:
                continue
            self._alive[key] = storage.nbytes(), weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._held += storage.nbytes()
            self.most = max(self.most, self._held)

    def _forget(self, key: int) -> None:
        size, _ = self._alive.pop(key)
        self._held -= size
