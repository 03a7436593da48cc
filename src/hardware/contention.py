"""Whether others compute on a device while it is measured: a peak that they made too low must not be kept.

A disturbance that comes and goes needs no detection: the best of many short rounds counts, and one that is undisturbed
is enough. A constant one lowers every round alike, so that the spread of the rounds does not show it. Only the load does:

- On a CPU the time that others used during the measurement. Time that a hypervisor took away (steal) is part of it.
- On a GPU the utilisation right before and right after, when this process computes nothing there. The processes that
  have memory there tell less: an idle one disturbs nobody, and a container does not see its own process among them.
"""

import time
from collections.abc import Callable
from typing import Self

import psutil
import torch

MOST_CPU_SHARE = 0.1  # an idle virtual machine has 2 to 3 % of steal
MOST_UTILIZATION_PCT = 10
WINDOW_S = 1.1  # NVML's utilisation is of the last 1/6 to 1 s

CpuSeconds = tuple[float, float, float]  # of all cores in all; of them busy; of them busy for this process


class Contention:
    """Watches a device from before a measurement until after it.

        with Contention(device) as others:
            ...
        others.finding  # None, or what disturbed the measurement

    Args:
        device: the one that is measured.
        cpu_seconds: reads the processor's times.
        utilization: reads the device's utilisation in %; None where it does not tell.
        sleep: waits for a number of seconds.

    Attributes:
        finding: one clause, or None where nothing was seen, and on a device that does not tell.
    """

    def __init__(
        self,
        device: torch.device,
        cpu_seconds: Callable[[], CpuSeconds] | None = None,
        utilization: Callable[[torch.device], float | None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.finding: str | None = None
        self._device = device
        self._cpu_seconds = cpu_seconds or _cpu_seconds
        self._utilization = utilization or _utilization
        self._sleep = sleep

    def __enter__(self) -> Self:
        if self._device.type == "cpu":
            self._before = self._cpu_seconds()
        elif (self._utilization(self._device) or 0) > MOST_UTILIZATION_PCT:
            self._look_at_device()  # again, after a window in which this process computed nothing
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cpu":
            total, busy, own = (after - before for after, before in zip(self._cpu_seconds(), self._before, strict=True))
            share = (busy - own) / total if total > 0 else 0.0
            if share > MOST_CPU_SHARE:
                self.finding = f"others used {share:.0%} of the processor meanwhile"
        elif self.finding is None:
            self._look_at_device()

    def _look_at_device(self) -> None:
        if self._utilization(self._device) is None:
            return
        self._sleep(WINDOW_S)
        percent = self._utilization(self._device)
        if percent is not None and percent > MOST_UTILIZATION_PCT:
            self.finding = f"others kept the {self._device.type} busy {percent:.0f} % of the time"


def _cpu_seconds() -> CpuSeconds:
    times = psutil.cpu_times()
    # Linux counts the time of guests in `user` and in `nice`, too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total, total - times.idle - getattr(times, "iowait", 0.0), time.process_time()


def _utilization(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # noqa: BLE001 - a library that is missing, a driver that refuses, a MIG instance: each its own
        return None
