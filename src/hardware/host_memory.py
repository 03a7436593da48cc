"""The host's memory, as far as this process may use it: that of the machine, within the limits of its control groups.

Imports no torch: a sweep asks before each run.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_PROCESS_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of control groups of version 2 and 1: the folder of all groups, a group's limit, its use, and the cache in that use.
_VERSION_2 = ("", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


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
