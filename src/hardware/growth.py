"""Memory that creeps: whether a reading rises all through a training, by how much, and when it will be full.

A leak raises the lowest readings: what a collector frees, or a validation holds for a while, is in no minimum. So the
minima of equal blocks of time are looked at, without the first fifth of the time. They grow where

1. what they rise by from block to block is on average shown to be above 0, with an error rate of 0.1 %: by Student's t
   of these differences, which a random walk (fragmentation) does not pass more often;
2. the last third of them still rises at half of this rate: a cache that fills rises less and less;
3. they rise by more than 16 MiB and 1 % of the first of them.
"""

import math
from collections.abc import Sequence

import numpy
from scipy.special import stdtrit

SHORTEST_S = 60.0  # after the warm-up: a shorter training tells nothing
_WARM_UP = 0.2  # of the time
_BLOCKS, _IN_A_BLOCK = 24, 4  # and the samples that a block has on average, at least
_CONFIDENCE = 0.999
_STILL = 0.5  # of the rate of all, by the last third
_LEAST_GIB, _LEAST_SHARE = 16 / 1024, 0.01


def growth(seconds: Sequence[float], gib: Sequence[float]) -> float | None:
    """The GiB a second by which N readings of memory grow, given their increasing times; None where no growth is shown."""
    times, values = numpy.asarray(seconds, float), numpy.asarray(gib, float)
    if not len(times):
        return None
    begin = times[0] + _WARM_UP * (times[-1] - times[0])
    times, values = times[times >= begin], values[times >= begin]
    if len(times) < _BLOCKS * _IN_A_BLOCK or times[-1] - times[0] < SHORTEST_S:
        return None
    length = (times[-1] - times[0]) / _BLOCKS
    blocks = numpy.minimum((times - times[0]) / length, _BLOCKS - 1).astype(int)
    numbers, first = numpy.unique(blocks, return_index=True)
    if len(numbers) < _BLOCKS:  # the samples stopped for a while
        return None
    minima = numpy.minimum.reduceat(values, first)
    rises = numpy.diff(minima) / length
    rate, error = float(rises.mean()), float(rises.std(ddof=1)) / math.sqrt(len(rises))
    is_shown = rate > float(stdtrit(len(rises) - 1, _CONFIDENCE)) * error
    is_large = rate * length * len(rises) > max(_LEAST_GIB, _LEAST_SHARE * minima[0])
    goes_on = rises[-(len(rises) // 3) :].mean() >= _STILL * rate
    return rate if is_shown and is_large and goes_on else None
