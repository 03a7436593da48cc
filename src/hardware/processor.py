"""The processor time that this run uses, and the time of the cores that it may use.

A run's own time is that of this process, its descendants, and the other ranks of the run. Where a control group has a
quota below its cores, the quota is what may be used, and processes outside of the group take nothing from it.
"""

import contextlib
import functools
import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from .. import ranks

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_TABLE_S = 2.0  # the table of all processes takes milliseconds to read: it is read once in so many seconds


class Load(NamedTuple):
    """Seconds of one core up to a moment; two of them differ by what happened between."""

    total: float  # of the cores that this process may use, or of the quota
    busy: float  # with any process, or taken by the hypervisor (steal)
    own: float  # with this run


def cpu_seconds(proc: Path = PROC, cgroup: Path = CGROUP) -> Load:
    """The processor time up to now."""
    own = own_seconds(_root_of_run(), proc)
    total, busy, steal = _core_seconds(proc)
    quota = cpu_quota(cgroup)
    if quota is not None and quota.cores < (cores := len(os.sched_getaffinity(0))):
        total, busy = quota.cores * time.monotonic(), quota.used_s + steal * quota.cores / cores
    return Load(total, busy, own)


def own_seconds(root: int | None = None, proc: Path = PROC) -> float:
    """Processor time of a process (this one by default) and of its descendants, those that have ended included.

    A process that is bound to other cores than this one does not count: it takes nothing from the cores of this one.
    """
    ended = os.times()
    seconds = time.process_time() + ended.children_user + ended.children_system
    root = os.getpid() if root is None else root
    for pid in {root, *_descendants(root, proc)} - {os.getpid()}:
        if _shares_cores(pid):
            with contextlib.suppress(psutil.Error):  # it has just ended, and its parent's time holds its own
                seconds += sum(psutil.Process(pid).cpu_times()[:4])  # with that of its own ended children
    return seconds


def _root_of_run() -> int:
    """The process that has started all processes of the run: of several ranks it is their parent."""
    rank = ranks.current()
    is_one_of_several = rank.rank > 0 or (rank.launcher and rank.world_size > 1)
    return os.getppid() if is_one_of_several else os.getpid()


def _shares_cores(pid: int) -> bool:
    try:
        return bool(os.sched_getaffinity(pid) & os.sched_getaffinity(0))
    except (OSError, AttributeError):  # it has ended, or this is not Linux
        return True


def _descendants(root: int, proc: Path) -> list[int]:
    """By Linux's lists of children, which are read in microseconds, or by the table of all processes."""
    found, left = [], [root]
    try:
        while left:
            tasks = f"{proc}/{left.pop()}/task"
            for task in os.listdir(tasks):
                # A process may have hundreds of tasks.
                with open(f"{tasks}/{task}/children", "rb", buffering=0) as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                left += children
    except (OSError, ValueError):  # a kernel without these lists, another system, or a child that has just ended
        return _descendants_in_table(root, int(time.monotonic() / _TABLE_S))
    return found


@functools.lru_cache(maxsize=1)
def _descendants_in_table(root: int, when: int) -> list[int]:
    """As the table of all processes has them; `when` changes when it is to be read again."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(root).children(recursive=True)]
    return []


def _core_seconds(proc: Path) -> tuple[float, float, float]:
    """Seconds of the cores that this process may use: in all, busy, and taken by the hypervisor.

    Other cores of a large machine may belong to other jobs, which disturb nobody here.
    """
    try:
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        rows = [[int(ticks) for ticks in line[1:9]] for line in lines if line and line[0] in mine]
        # Linux counts the time of guests, which follows, in `user` and in `nice`, too.
        user, nice, system, idle, waiting, irq, softirq, steal = (sum(column) for column in zip(*rows, strict=True))
    except (OSError, ValueError, AttributeError):  # not Linux
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total, total - times.idle - getattr(times, "iowait", 0.0), getattr(times, "steal", 0.0)
    busy = user + nice + system + irq + softirq + steal
    tick = os.sysconf("SC_CLK_TCK")
    return (busy + idle + waiting) / tick, busy / tick, steal / tick


def usable_cores(cgroup: Path = CGROUP) -> float:
    """The cores that this process may use: its affinity, or the quota of its control group if that is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroup)
    return cores if quota is None else min(cores, quota.cores)


class Quota(NamedTuple):
    """The processor time that a control group may use, in cores, and what it has used, in seconds of one core."""

    cores: float
    used_s: float


def cpu_quota(cgroup: Path = CGROUP) -> Quota | None:
    """The quota of this container's control group, of version 2 or 1; None where there is none."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no quota
        quota, period = map(int, (cgroup / "cpu.max").read_text().split())
        used = dict(line.split() for line in (cgroup / "cpu.stat").read_text().splitlines())
        return Quota(quota / period, int(used["usage_usec"]) / 1e6)
    with contextlib.suppress(OSError, ValueError):
        quota, period = (int((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0:  # -1 is no quota
            return Quota(quota / period, int((cgroup / "cpuacct" / "cpuacct.usage").read_text()) / 1e9)
    return None
