"""The host's memory: what this process may use, and what it holds.

Imports no torch: a sweep asks before each run.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from .._system import control_groups


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
