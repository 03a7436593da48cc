"""Memory that a CPU step has freed is kept for the next step, instead of being returned to the system and faulted in
again page by page."""

import ctypes
import os
import sys

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1  # read as an unsigned number: no top of the heap is ever that large
_LARGEST = 2**30  # bytes; a single tensor above it is still mapped by itself, and unmapped when it is freed


def keep_freed_memory() -> bool:
    """Have the C library keep what this process frees.

    glibc maps every allocation above a threshold (at most 32 MiB, adjusted while the program runs) by itself and
    unmaps it when it is freed, and gives the free top of its heap back. A training step frees what the last one
    allocated: the SimpleCNN then spends a sixth to a quarter of a step at batch 128, and half of one at batch 2,048, on
    page faults for memory that it has just had (benchmarks/allocator.py). The price is that the process keeps its peak
    until it ends, and that the peak can be up to a third higher.

    Returns:
        Whether anything was changed: False without glibc, and where `MALLOC_*_` variables say what the user wants.

    Source: mallopt(3).
    """
    chosen = any(f"MALLOC_{name}_" in os.environ for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX"))
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
