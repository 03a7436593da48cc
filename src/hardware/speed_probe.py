"""A fixed product, timed now and then beside the training: it slows down with the machine, and not with the model."""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from .._torch import any_mode

_NUMBERS = 16_384  # of float32 in each factor: few enough for torch to compute on one thread, and for the nearest cache
_PRODUCTS = 80  # timed together: 0.2 to 0.5 ms
_TIMES = 3  # the median of so many is one reading, so that a single interrupt is not a slow machine
MAX_SHARE = 0.005  # of the time


class SpeedProbe:
    """Reads the speed of a processor that trains. It reads nothing beside an accelerator, where timing has to wait.

    The product is computed on one thread, because the threads of a busy machine wait for each other for far longer than a
    probe may take. It draws no random numbers, and keeps 192 KiB of memory.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._began, self._spent = clock(), 0.0
        factor = torch.ones(_NUMBERS, dtype=torch.float32, device="cpu")
        self._factors = [factor, factor.clone(), factor.clone()] if device.type == "cpu" else []

    def read(self) -> float:
        """Seconds of the products; NaN where they are not known, or have taken their share of the time already."""
        began = self._clock()
        if not self._factors or any_mode() or self._spent > MAX_SHARE * max(began - self._began, 0.0):
            return math.nan
        with torch.inference_mode():
            marks = [self._clock(), *(self._time() for _ in range(_TIMES))]
        self._spent += max(marks[-1] - began, 0.0)
        seconds = median(late - early for early, late in pairwise(marks))
        return seconds if seconds > 0 else math.nan  # a clock that jumps

    def _time(self) -> float:
        left, right, result = self._factors
        for _ in range(_PRODUCTS):
            torch.mul(left, right, out=result)
        return self._clock()
