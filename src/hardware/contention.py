"""Detect what disturbs a measurement: other processes, the hypervisor, and an accelerator's lowered clocks.

Two measurements ask. A step is disturbed by the rule in `is_disturbed`. A peak that others lower must not be cached: a
short disturbance needs no detection, because the best of many short blocks counts. A constant one shows in the load:

- On a CPU, the time that others used during the measurement. The hypervisor's time (steal) is part of it.
- On a GPU, the utilisation right before and right after, when this process computes nothing there. The list of processes
  is no measure: an idle one disturbs nobody, and a container does not see its own process in the list.
"""

import contextlib
import math
import os
import time
from pathlib import Path
from typing import NamedTuple, Self

import psutil
import torch

from .. import ranks
from ..records.formatting import percent
from .probes import CGROUP, cpu_quota

try:
    import resource
except ImportError:  # Windows
    resource = None

MAX_CPU_SHARE = 0.1  # an idle virtual machine has 2 to 3 % of steal
MAX_OTHERS = 0.5  # of the CPU: above it others disturb a run even where cores are free
MAX_PROBE_RATIO = 1.25
MAX_UTILIZATION_PCT = 10
WINDOW_S = 2.1  # NVML's utilisation is of the last complete window, which took 1/6 to 1 s and began up to 2 s ago


class Contention:
    """Watches a device from before a measurement until after it, as a context manager."""

    def __init__(self, device: torch.device):
        self.finding: str | None = None  # what disturbed the measurement; None on a device that reports nothing
        self._device = device

    def __enter__(self) -> Self:
        if self._device.type == "cpu":
            self._before = cpu_seconds()
        elif (utilization(self._device) or 0) > MAX_UTILIZATION_PCT:
            self._look_at_device()  # again, after a window in which this process computed nothing
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cpu":
            noise = noise_between(self._before, cpu_seconds())
            share = noise.others_share
            if share > MAX_CPU_SHARE:
                self.finding = f"other processes used {percent(share)} of the CPU during the measurement"
        elif self.finding is None:
            self._look_at_device()

    def _look_at_device(self) -> None:
        if utilization(self._device) is None:
            return
        time.sleep(WINDOW_S)
        busy = utilization(self._device)
        if busy is not None and busy > MAX_UTILIZATION_PCT:
            self.finding = f"other processes kept the {self._device.type} busy {percent(busy / 100)} of the time"


class Load(NamedTuple):
    """What the processor time that this process may use has been spent on until now, in seconds of one core.

    That is the time of its cores. Where a control group has a quota below them, it is the quota, used by the group's
    processes: those outside of it take nothing from it.
    """

    total: float
    busy: float  # with any process, or taken by the hypervisor (steal)
    own: float  # with this process, its children, and the other ranks of its run that share its cores
    steal: float = 0.0


class Noise(NamedTuple):
    """What disturbed the machine between two readings; NaN stands for unknown. Shares are of the cores' time."""

    others_share: float = math.nan  # other processes and the hypervisor
    idle_share: float = math.nan


def noise_between(before: Load, after: Load) -> Noise:
    """The shares between two readings; unknown where no time passed. Clocks that tick differently give no negative share."""
    total, busy, own, _ = (late - early for early, late in zip(before, after, strict=True))
    if not total > 0:
        return Noise()
    return Noise(*(min(max(part / total, 0.0), 1.0) for part in (busy - own, total - busy)))


def is_disturbed(noise: Noise) -> bool:
    """Whether others took more than a tenth of the cores' time, and more than was left idle; what is unknown disturbs nothing."""
    return noise.others_share > MAX_CPU_SHARE and noise.others_share > noise.idle_share


class NoiseMeter:
    """Reads what disturbs a device's machine from one call to the next."""

    def __init__(self, device: torch.device):
        self._before = cpu_seconds()

    def read(self) -> Noise:
        """The noise since the last call."""
        before, self._before = self._before, cpu_seconds()
        return noise_between(before, self._before)


def others_share(before: Load, after: Load) -> float:
    """The share of the CPU that others used between two calls of `cpu_seconds`; 0 if they left cores free.

    More than `MAX_OTHERS` counts in any case: a run that waits for them leaves cores free, too.
    """
    noise = noise_between(before, after)
    taken = noise.others_share
    crowded = taken > MAX_CPU_SHARE and noise.idle_share <= MAX_CPU_SHARE
    return taken if crowded or taken > MAX_OTHERS else 0.0


def cpu_seconds(proc: Path = Path("/proc"), cgroup: Path = CGROUP) -> Load:
    """The load up to now."""
    ended = os.times()
    own = time.process_time() + ended.children_user + ended.children_system
    for other in _others_of_this_run(proc):
        with contextlib.suppress(psutil.Error):
            own += sum(psutil.Process(other).cpu_times()[:4])  # children that have ended are in it, too
    total, busy, steal = _cores(proc)
    quota = cpu_quota(cgroup)
    if quota is not None and quota.cores < (cores := len(os.sched_getaffinity(0))):
        steal *= quota.cores / cores
        total, busy = quota.cores * time.monotonic(), quota.used_s + steal
    return Load(total, busy, own, steal)


def _cores(proc: Path) -> tuple[float, float, float]:
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


def _others_of_this_run(proc: Path) -> list[int]:
    """This process's descendants, and where it is one of several ranks those of its parent, which has started them all.

    One that is bound to other cores takes nothing from those of this process.
    """
    rank = ranks.current()
    is_one_of_several = rank.rank > 0 or (rank.launcher and rank.world_size > 1)
    root = os.getppid() if is_one_of_several else os.getpid()
    return [pid for pid in [root, *_descendants(root, proc)] if pid != os.getpid() and _shares_cores(pid)]


def _shares_cores(pid: int) -> bool:
    try:
        return bool(os.sched_getaffinity(pid) & os.sched_getaffinity(0))
    except (OSError, AttributeError):  # it has ended, or this is not Linux
        return True


def _descendants(root: int, proc: Path) -> list[int]:
    """A process's children, and theirs: from Linux's lists of children, which is cheap, or from all processes."""
    found, left = [], [root]
    try:
        while left:
            pid = left.pop()
            for task in os.listdir(proc / str(pid) / "task"):
                children = [int(child) for child in (proc / str(pid) / "task" / task / "children").read_text().split()]
                found += children
                left += children
    except (OSError, ValueError):  # a kernel without these lists, another system, or a child that has just ended
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(root).children(recursive=True)]
    return found


def _involuntary_switches() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw) if resource else math.nan


def utilization(device: torch.device) -> float | None:
    """The device's utilisation in %; None where it reports none."""
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # a missing library, a refusing driver, a MIG instance: each has its own
            return float(torch.cuda.utilization(device))
    return None
