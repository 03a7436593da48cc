"""Detect what disturbs a measurement on the processor: other processes and the hypervisor.

A window of steps, and the peaks of a CPU, are disturbed by the rule in `is_disturbed`. Peaks that others lower must not be
kept: a short disturbance needs no detection, because the best of many short blocks counts.
"""

import math
from typing import NamedTuple

from .processor import cpu_seconds

MAX_SHARE = 0.1  # an idle virtual machine has 2 to 3 % of steal


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
