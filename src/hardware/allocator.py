"""Keep the memory that a CPU step frees for the next step, instead of returning it and faulting it in page by page."""

import ctypes
import os
import sys

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1  # read as an unsigned number: no top of the heap is ever that large
_LARGEST = 2**30  # bytes; a single tensor above it is still mapped by itself, and unmapped when it is freed


def keep_freed_memory() -> bool:
    """Have the C library keep what this process frees.

    glibc unmaps a large allocation when it is freed, and returns the free top of its heap. Without this call the
    SimpleCNN spends a sixth to a quarter of a step on page faults at batch 128, and half of a step at batch 2,048
    (benchmarks/allocator.py). The price: the process keeps its peak until it ends, and the peak can be a third higher.

    Returns:
        Whether anything was changed: False without glibc, and where the user has set a `MALLOC_*_` variable.
    """
    chosen = any(f"MALLOC_{name}_" in os.environ for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX"))
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
