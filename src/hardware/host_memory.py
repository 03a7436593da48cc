"""The host's memory: what this process may use, what it holds, and that it keeps what it frees.

Imports no torch: a sweep asks before each run.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from .processor import control_groups

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1  # read as an unsigned number: no top of the heap is ever that large
_LARGEST = 2**30  # bytes; a single tensor above it is still mapped by itself, and unmapped when it is freed


class HostMemory(NamedTuple):
    """Bytes."""

    total: int
    available: int


def host_memory() -> HostMemory:
    """The least of the machine's memory and the limits of the process's control groups, now."""
    machine = psutil.virtual_memory()
    totals, free = zip((machine.total, machine.available), *_group_limits(), strict=True)
    return HostMemory(min(totals), max(0, min(free)))


def _group_limits() -> Iterator[tuple[int, int]]:
    """Bytes that each control group of this process, of version 2, allows and leaves free.

    The page cache, which the kernel takes back first, is free.
    """
    for group in control_groups("memory"):
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or a group of version 1
            most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
            facts = dict(fact.split() for fact in (group / "memory.stat").read_text().splitlines())
            yield most, most - used + int(facts.get("inactive_file", 0))


def private_rss(process: psutil.Process) -> int:
    """Bytes that a process has in RAM, without files that are mapped (libraries), which processes share.

    It counts a process that was forked after its imports as it counts one that has imported by itself.
    """
    held = process.memory_info()
    return held.rss - getattr(held, "shared", 0)  # which macOS and Windows do not report


def keep_freed_memory() -> bool:
    """Have the C library keep what this process frees.

    glibc unmaps a large allocation when it is freed, and returns the free top of its heap. Without this call the
    SimpleCNN spends a sixth to a quarter of a step on page faults at batch 128, and half of a step at batch 2,048
    (benchmarks/speed.py memory). The price: the process keeps its peak until it ends, and the peak can be a third higher.

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
