"""Detect what disturbs a measurement: other processes and the hypervisor on a CPU, other processes on a GPU.

Two measurements ask. A window of steps is disturbed by the rule in `is_disturbed`. A peak that others lower must not be
cached: a short disturbance needs no detection, because the best of many short blocks counts. A constant one shows:

- On a CPU, in the time that others used during the measurement.
- On a GPU, in the utilisation right after, when this process computes nothing there. The list of processes is no measure:
  an idle one disturbs nobody, and a container does not see its own process in the list.
"""

import contextlib
import math
import time
from typing import Any, NamedTuple

import torch

from ..records.formatting import percent
from .nvml_readings import UTILIZATION, gpu_queries
from .processor import cpu_seconds

MAX_SHARE = 0.1  # an idle virtual machine has 2 to 3 % of steal
MAX_UTILIZATION_PCT = 10
WINDOW_S = 2.1  # NVML's utilisation is of the last complete window, which took 1/6 to 1 s and began up to 2 s ago


class Noise(NamedTuple):
    """Shares of the cores' time between two moments; NaN stands for unknown."""

    others_share: float = math.nan  # used by other processes than this run's, or taken by the hypervisor (steal)
    idle_share: float = math.nan


def is_disturbed(noise: Noise) -> bool:
    """Whether others took more than a tenth of the cores' time, and more than was left idle. Unknown noise does not disturb."""
    return noise.others_share > MAX_SHARE and noise.others_share > noise.idle_share


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


def disturbance(device: torch.device, noise: Noise) -> str | None:
    """What others did on a device during a measurement that has just ended; None on a device that reports nothing.

    A GPU, on which this process computes no more, is watched for two seconds.
    """
    if device.type == "cpu":
        words = f"other processes used {percent(noise.others_share)} of the CPU during the measurement"
        return words if is_disturbed(noise) else None
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):  # a missing library, a refusing driver, a MIG instance: each has its own
        utilization: Any = gpu_queries(device)[UTILIZATION]
        utilization()  # a device that does not tell is not waited for
        time.sleep(WINDOW_S)
        if (busy_pct := utilization()) > MAX_UTILIZATION_PCT:
            return f"other processes kept the {device.type} busy {percent(busy_pct / 100)} of the time"
    return None
