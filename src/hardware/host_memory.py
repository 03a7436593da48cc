"""The host's memory: what this process may use.

Imports no torch: a sweep asks before each run.
"""

import contextlib
from typing import Any

import psutil

from .._system import control_groups

# Of a control group of version 2 and of 1, in which no limit is a number above any machine's memory.
_FILES = (("max", "current", "inactive_file"), ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"))


def host_memory() -> Any:
    """The bytes of the machine as psutil tells them now, of which `total` and `available` are at most what the limits of the
    process's control groups allow and leave free. The page cache, which the kernel takes back first, is free.
    """
    machine = psutil.virtual_memory()
    totals, free = [machine.total], [machine.available]
    for group in control_groups("memory"):
        for limit, usage, cache in _FILES:
            with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or a group of the other version
                most, used = (int((group / f"memory.{name}").read_text()) for name in (limit, usage))
                facts = dict(fact.split() for fact in (group / "memory.stat").read_text().splitlines())
                free.append(most - used + int(facts.get(cache, 0)))
                totals.append(most)
    return machine._replace(total=min(totals), available=max(0, min(free)))
