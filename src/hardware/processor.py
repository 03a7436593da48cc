"""Processor time: of this run, of the cores that it may use, and of other programs.

The time of a run is that of this process, its descendants, and the other ranks of the run. If the quota of a control group is
below its cores, the run may use the quota, and processes outside of the group take nothing from it.

`is_disturbed` decides whether a window of steps, or the measurement of a CPU's peaks, is disturbed. Disturbed peaks must not be
kept. A short disturbance needs no detection, because the best of many short blocks counts.
"""

import contextlib
import math
import os
import time
from collections import defaultdict
from typing import NamedTuple

import psutil

from .. import _system, ranks
from .._system import affinity, control_groups, online_cores

MAX_SHARE = 0.1  # an idle virtual machine has 2 to 3 % of steal
# By root: the last known seconds of its descendants, on systems where a parent does not keep the time of ended children.
_seconds_by_root = defaultdict[int, dict[psutil.Process, float]](dict)


class Noise(NamedTuple):
    """Shares of the cores' time in an interval; NaN is unknown."""

    others_share: float = math.nan  # used by processes outside of this run, or by the hypervisor (steal)
    idle_share: float = math.nan


def is_disturbed(noise: Noise) -> bool:
    """Return whether others took more than a tenth of the cores' time, and more than was idle. Unknown noise does not disturb."""
    return noise.others_share > MAX_SHARE and noise.others_share > noise.idle_share


def slowing_share(noise: Noise, device: str) -> float:
    """Return the share of the cores' time by which others may have slowed a run on a kind of device; NaN if unknown.

    The host of an accelerator has spare cores for other programs: unless these disturb the run, they do not slow it.
    """
    has_spare_cores = device != "cpu" and noise.others_share >= 0 and not is_disturbed(noise)
    return 0.0 if has_spare_cores else noise.others_share


class NoiseMeter:
    """Measures the noise between successive calls."""

    def __init__(self) -> None:
        self._last = cpu_seconds()

    def read(self) -> Noise:
        """Return the noise since the last call; unknown if no time passed."""
        previous, self._last = self._last, cpu_seconds()
        total, busy, own = (after - before for before, after in zip(previous, self._last, strict=True))
        if not total > 0:
            return Noise()
        return Noise(*(min(max(part / total, 0.0), 1.0) for part in (busy - own, total - busy)))  # clocks may disagree


def cpu_seconds() -> tuple[float, float, float]:
    """Return core-seconds up to now: the total of usable cores or of the quota; busy ones, with any process or taken by the
    hypervisor (steal); and those of this run. NaN if the system does not report them, as in some sandboxes.

    Other cores do not count: on a large machine they may belong to other jobs, which do not disturb this one.
    """
    usable, quota = affinity(), _cpu_quota()
    try:
        cores = psutil.cpu_times(percpu=True)
    except (OSError, psutil.Error):
        return math.nan, math.nan, math.nan
    numbers = online_cores() or range(len(cores))  # psutil lists online cores, without their numbers
    if usable.issubset(numbers) and len(numbers) == len(cores):
        cores = [core for number, core in zip(numbers, cores, strict=True) if number in usable]
    total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in cores)
    busy = total - sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    if quota is not None and quota[0] < len(usable):
        steal = sum(getattr(core, "steal", 0.0) for core in cores)
        total, busy = quota[0] * time.monotonic(), quota[1] + steal * quota[0] / len(usable)
    return total, busy, own_seconds(root_of_run())


def own_seconds(root: int | None = None) -> float:
    """Return the processor seconds of a process (this one by default) and of its descendants, including ended ones.

    On Windows the time of a descendant between the last call and its end is unknown.
    """
    own_times = os.times()
    root = os.getpid() if root is None else root
    seconds_by_process: dict[psutil.Process, float] = {} if _system.PARENTS_KEEP_TIMES else _seconds_by_root[root]
    for pid in {root, *_system.descendants(root)} - {os.getpid()}:
        with contextlib.suppress(psutil.Error):  # it has just ended, and its parent's time includes its time
            process = psutil.Process(pid)
            seconds_by_process[process] = sum(process.cpu_times()[:4])  # with the time of its ended children
    return time.process_time() + own_times.children_user + own_times.children_system + sum(seconds_by_process.values())


def usable_cores() -> float:
    """Return the cores that this process may use: its affinity, or the quota of its control groups if that is lower."""
    quota, cores = _cpu_quota(), len(affinity())
    return cores if quota is None else min(cores, quota[0])


def root_of_run() -> int:
    """Return the process that started all processes of the run: of several ranks, their parent."""
    rank = ranks.current_rank()
    is_one_of_several = rank.rank > 0 or (rank.launcher and rank.world_size > 1)
    return os.getppid() if is_one_of_several else os.getpid()


def _cpu_quota() -> tuple[float, float] | None:
    """Return the lowest quota of this process's control groups (version 2) in cores, and the seconds that its group has used."""
    quotas = []
    for group in control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = map(int, (group / "cpu.max").read_text().split())
            used = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            quotas.append((quota / period, int(used["usage_usec"]) / 1e6))
    return min(quotas, default=None)
