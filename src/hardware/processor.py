"""The processor time that this run uses, that of the cores that it may use, and what others take of it.

A run's own time is that of this process, its descendants, and the other ranks of the run. Where a control group has a
quota below its cores, the quota is what may be used, and processes outside of the group take nothing from it.

A window of steps, and the peaks of a CPU, are disturbed by the rule in `is_disturbed`. Peaks that others lower must not be
kept: a short disturbance needs no detection, because the best of many short blocks counts.
"""

import contextlib
import math
import os
import time
from collections import defaultdict
from typing import NamedTuple

import psutil

from .. import _system, ranks
from .._system import affinity, control_groups

MAX_SHARE = 0.1  # an idle virtual machine has 2 to 3 % of steal
# Of each root: what its processes had used when they were last read, where no parent has the time of those that have ended.
_spent = defaultdict[int, dict[psutil.Process, float]](dict)


class Noise(NamedTuple):
    """Shares of the cores' time between two moments; NaN stands for unknown."""

    others_share: float = math.nan  # used by other processes than this run's, or taken by the hypervisor (steal)
    idle_share: float = math.nan


def is_disturbed(noise: Noise) -> bool:
    """Whether others took more than a tenth of the cores' time, and more than was left idle. Unknown noise does not disturb."""
    return noise.others_share > MAX_SHARE and noise.others_share > noise.idle_share


def slowing_share(noise: Noise, device: str) -> float:
    """The share of the cores' time by which others may have slowed a run on a kind of device; NaN where it is unknown.

    An accelerator's host has free cores for other programs: there they slow nothing that they do not disturb.
    """
    slows_nothing = device != "cpu" and noise.others_share >= 0 and not is_disturbed(noise)
    return 0.0 if slows_nothing else noise.others_share


class NoiseMeter:
    """Reads the noise from one call to the next."""

    def __init__(self) -> None:
        self._last = cpu_seconds()

    def read(self) -> Noise:
        """The noise since the last call; unknown where no time passed."""
        before, self._last = self._last, cpu_seconds()
        total, busy, own = (late - early for early, late in zip(before, self._last, strict=True))
        if not total > 0:
            return Noise()
        return Noise(*(min(max(part / total, 0.0), 1.0) for part in (busy - own, total - busy)))  # clocks may disagree


def cpu_seconds() -> tuple[float, float, float]:
    """Seconds of one core up to now: of the cores that this process may use, or of the quota; busy with any process, or taken by
    the hypervisor (steal); and with this run. NaN where the system does not tell them, as in some sandboxes.

    Other cores of a large machine may belong to other jobs, which disturb nobody here.
    """
    mine, quota = affinity(), _quota()
    try:
        cores = psutil.cpu_times(percpu=True)
    except (OSError, psutil.Error):
        return math.nan, math.nan, math.nan
    if max(mine) < len(cores):  # psutil counts the cores that are online: with others among them no number is a place
        cores = [cores[core] for core in mine]
    total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in cores)
    busy = total - sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    if quota is not None and quota[0] < len(mine):
        steal = sum(getattr(core, "steal", 0.0) for core in cores)
        total, busy = quota[0] * time.monotonic(), quota[1] + steal * quota[0] / len(mine)
    return total, busy, own_seconds(root_of_run())


def own_seconds(root: int | None = None) -> float:
    """Processor time of a process (this one by default) and of its descendants, those that have ended included.

    On Windows what a descendant has used between the last call and its end is not known.
    """
    ended = os.times()
    root = os.getpid() if root is None else root
    spent: dict[psutil.Process, float] = {} if _system.PARENTS_KEEP_TIMES else _spent[root]
    for pid in {root, *_system.descendants(root)} - {os.getpid()}:
        with contextlib.suppress(psutil.Error):  # it has just ended, and its parent's time holds its own
            process = psutil.Process(pid)
            spent[process] = sum(process.cpu_times()[:4])  # with that of its own ended children
    return time.process_time() + ended.children_user + ended.children_system + sum(spent.values())


def usable_cores() -> float:
    """The cores that this process may use: its affinity, or the quota of its control groups if that is lower."""
    quota, cores = _quota(), len(affinity())
    return cores if quota is None else min(cores, quota[0])


def root_of_run() -> int:
    """The process that has started all processes of the run: of several ranks it is their parent."""
    rank = ranks.current()
    is_one_of_several = rank.rank > 0 or (rank.launcher and rank.world_size > 1)
    return os.getppid() if is_one_of_several else os.getpid()


def _quota() -> tuple[float, float] | None:
    """The lowest quota of this process's control groups (of version 2), in cores, and what that group has used, in seconds."""
    quotas = []
    for group in control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = map(int, (group / "cpu.max").read_text().split())
            used = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            quotas.append((quota / period, int(used["usage_usec"]) / 1e6))
    return min(quotas, default=None)
