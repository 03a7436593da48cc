"""The host's memory: what this process may use, what it holds, and that it keeps what it frees.

Imports no torch: a sweep asks before each run.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_PROCESS_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of control groups of version 2 and 1: the folder of all groups, a group's limit, its use, and the cache in that use.
_VERSION_2 = ("", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
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
    """Bytes that each control group of this process allows and leaves free: its own group, and all that contain this group."""
    memberships = []
    with contextlib.suppress(OSError):  # not Linux
        memberships = _PROCESS_GROUPS.read_text().splitlines()
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit, used, cache = _VERSION_1 if controllers else _VERSION_2
        root = _GROUPS / folder
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or a group outside the container
                    most = int((group / limit).read_text())
                    yield most, most - int((group / used).read_text()) + _cache_in(group, cache)


def _cache_in(group: Path, key: str) -> int:
    """Bytes of the page cache that the kernel takes back before a control group runs out of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == key:
                return int(number)
    return 0


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
