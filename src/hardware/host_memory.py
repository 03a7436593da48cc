"""The host's memory that this process may use. Imports no torch: a sweep reads it before each run."""

import contextlib
from typing import Any

import psutil

from .._system import control_groups

# Files of a control group of version 2 and of version 1. In version 1, "no limit" is a number above any machine's memory.
_FILES = (("max", "current", "inactive_file"), ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"))


def host_memory() -> Any:
    """Return psutil's memory of the machine, with `total` and `available` bounded by the limits of the process's control groups.

    The page cache of a control group counts as available, since the kernel reclaims it first.
    """
    machine = psutil.virtual_memory()
    limits, free = [machine.total], [machine.available]
    for group in control_groups("memory"):
        for limit_name, usage_name, cache_name in _FILES:
            with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or a group of the other version
                limit, used = (int((group / f"memory.{name}").read_text()) for name in (limit_name, usage_name))
                stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free.append(limit - used + int(stats.get(cache_name, 0)))
                limits.append(limit)
    return machine._replace(total=min(limits), available=max(0, min(free)))
