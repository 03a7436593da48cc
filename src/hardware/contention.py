"""Detect other processes that compute on a device while it is measured: a peak that they lower must not be cached.

A short disturbance needs no detection, because the best of many short blocks counts. A constant one shows in the load:

- On a CPU, the time that others used during the measurement. The hypervisor's time (steal) is part of it.
- On a GPU, the utilisation right before and right after, when this process computes nothing there. The list of processes
  is no measure: an idle one disturbs nobody, and a container does not see its own process in the list.
"""

import contextlib
import os
import time
from typing import Self

import psutil
import torch

from ..records.formatting import percent

MAX_CPU_SHARE = 0.1  # an idle virtual machine has 2 to 3 % of steal
MAX_OTHERS = 0.5  # of the CPU: above it others disturb a run even where cores are free
MAX_UTILIZATION_PCT = 10
WINDOW_S = 1.1  # NVML's utilisation is of the last 1/6 to 1 s


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
            total, busy, own = (after - before for after, before in zip(cpu_seconds(), self._before, strict=True))
            share = (busy - own) / total if total > 0 else 0.0
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


def others_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The share of the CPU that others used between two calls of `cpu_seconds`; 0 if they left cores free.

    More than `MAX_OTHERS` counts in any case: a run that waits for them leaves cores free, too.
    """
    total, busy, own = (late - early for early, late in zip(before, after, strict=True))
    share = (busy - own) / total if total > 0 else 0.0
    left_free = total - busy > MAX_CPU_SHARE * total
    return 0.0 if share <= MAX_CPU_SHARE or (left_free and share <= MAX_OTHERS) else share


def cpu_seconds() -> tuple[float, float, float]:
    """Seconds of all cores: in all, busy, and busy for this process and its children."""
    times = psutil.cpu_times()
    # Linux counts the time of guests in `user` and in `nice`, too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    ended = os.times()
    own = time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used = child.cpu_times()
            own += used.user + used.system
    return total, total - times.idle - getattr(times, "iowait", 0.0), own


def utilization(device: torch.device) -> float | None:
    """The device's utilisation in %; None where it reports none."""
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # a missing library, a refusing driver, a MIG instance: each has its own
            return float(torch.cuda.utilization(device))
    return None
