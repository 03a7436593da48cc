"""The processor time that this run uses, and the time of the cores that it may use.

A run's own time is that of this process, its descendants, and the other ranks of the run. Where a control group has a
quota below its cores, the quota is what may be used, and processes outside of the group take nothing from it.
"""

import contextlib
import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from .. import ranks

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


class Load(NamedTuple):
    """Seconds of one core up to a moment; two of them differ by what happened between."""

    total: float  # of the cores that this process may use, or of the quota
    busy: float  # with any process, or taken by the hypervisor (steal)
    own: float  # with this run


def cpu_seconds() -> Load:
    """The processor time up to now; NaN where the system does not tell it, as in some sandboxes."""
    try:
        total, busy, steal = _core_seconds()
    except (OSError, psutil.Error):
        return Load(math.nan, math.nan, math.nan)
    quota, cores = _quota(), len(_affinity())
    if quota is not None and quota[0] < cores:
        total, busy = quota[0] * time.monotonic(), quota[1] + steal * quota[0] / cores
    return Load(total, busy, own_seconds(root_of_run()))


def own_seconds(root: int | None = None) -> float:
    """Processor time of a process (this one by default) and of its descendants, those that have ended included.

    A process that is bound to other cores than this one does not count: it takes nothing from the cores of this one.
    """
    ended = os.times()
    seconds = time.process_time() + ended.children_user + ended.children_system
    root = os.getpid() if root is None else root
    for pid in {root, *_descendants(root)} - {os.getpid()}:
        if shares_cores(pid):
            with contextlib.suppress(psutil.Error):  # it has just ended, and its parent's time holds its own
                seconds += sum(psutil.Process(pid).cpu_times()[:4])  # with that of its own ended children
    return seconds


def usable_cores() -> float:
    """The cores that this process may use: its affinity, or the quota of its control group if that is lower."""
    quota, cores = _quota(), len(_affinity())
    return cores if quota is None else min(cores, quota[0])


def root_of_run() -> int:
    """The process that has started all processes of the run: of several ranks it is their parent."""
    rank = ranks.current()
    is_one_of_several = rank.rank > 0 or (rank.launcher and rank.world_size > 1)
    return os.getppid() if is_one_of_several else os.getpid()


def _affinity(pid: int = 0) -> set[int]:
    """The cores that a process may use; all of them outside of Linux."""
    return os.sched_getaffinity(pid) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def shares_cores(pid: int) -> bool:
    """Whether a process may use a core that this one may use; True of one that has ended."""
    with contextlib.suppress(OSError):  # it has ended
        return bool(_affinity(pid) & _affinity())
    return True


def _descendants(root: int) -> list[int]:
    """By Linux's lists of children, which are read in microseconds; psutil reads the table of all processes."""
    found, left = [], [root]
    try:
        while left:
            tasks = f"{PROC}/{left.pop()}/task"
            for task in os.listdir(tasks):
                # A process may have hundreds of tasks.
                with open(f"{tasks}/{task}/children", "rb", buffering=0) as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                left += children
    except (OSError, ValueError):  # a kernel without these lists, another system, or a child that has just ended
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(root).children(recursive=True)]
    return found


def _core_seconds() -> tuple[float, float, float]:
    """Seconds of the cores that this process may use: in all, busy, and taken by the hypervisor.

    Other cores of a large machine may belong to other jobs, which disturb nobody here.
    """
    each, mine = psutil.cpu_times(percpu=True), _affinity()
    if max(mine) < len(each):  # psutil counts the cores that are online: with others among them no number is a place
        each = [each[core] for core in mine]
    total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in each)
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in each)
    return total, total - idle, sum(getattr(core, "steal", 0.0) for core in each)


def _quota() -> tuple[float, float] | None:
    """What this container's control group (of version 2) may use, in cores, and has used, in seconds; None without one."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no quota
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        used = dict(line.split() for line in (CGROUP / "cpu.stat").read_text().splitlines())
        return quota / period, int(used["usage_usec"]) / 1e6
    return None
