"""What memory a training has taken, and whether an error says that there is no more."""

import contextlib
import sys
from collections.abc import Iterable

import psutil
import torch
from torch.distributed.tensor import DTensor

from .._torch import storage_id
from .traffic import storages

# In any other RuntimeError. cuBLAS and cuDNN report the lack of memory for their own buffers by a status.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OUT_OF_MEMORY += ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host has no more memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def private_rss(process: psutil.Process) -> int:
    """Bytes that a process has in RAM, without files that are mapped (libraries), which processes share.

    It counts a process that was forked after its imports as it counts one that has imported by itself.
    """
    held = process.memory_info()
    return held.rss - getattr(held, "shared", 0)  # which macOS and Windows do not report


def peak_rss() -> int:
    """The most bytes that this process has had in RAM so far; what it has now where the system does not keep the most."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return psutil.Process().memory_info().rss


def measured_bytes(device: torch.device) -> dict[str, int]:
    """What the device itself tells of its memory; empty for a device that tells nothing.

    CUDA: `allocated`, the most that tensors have held, and `reserved`, the most that torch's allocator has taken from the
    device for them. MPS: what they hold now. CPU: `process_peak`, the most that the process has had in RAM.
    """
    if device.type == "cuda":
        known = torch.cuda.memory_stats(device)
        return {name: known.get(f"{name}_bytes.all.peak", 0) for name in ("allocated", "reserved")}
    if device.type == "mps":
        return {"allocated": torch.mps.current_allocated_memory(), "reserved": torch.mps.driver_allocated_memory()}
    return {"process_peak": peak_rss()} if device.type == "cpu" else {}


def bytes_of(tensors: Iterable[object]) -> int:
    """Bytes of the storages of tensors, each storage once; of a sharded tensor those of this rank."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum({storage_id(storage): storage.nbytes() for each in local for storage in storages(each)}.values())
