"""A memory leak: whether a reading of memory grows all through a training, and how fast.

A leak raises the lowest readings: memory that a garbage collector frees, or that a validation holds for a while, is in no
minimum. So the test takes the minima of equal blocks of time, without the first fifth of the time. Memory grows if

1. the mean rise from block to block is above 0 at an error rate of 0.1 %, by Student's t of the rises, which a random walk
   (fragmentation) passes no more often;
2. the last third of the rises has at least half of the mean rate: a cache that fills rises less and less;
3. the minima rise by more than 16 MiB and 1 % of the first minimum.
"""

import math
from collections.abc import Sequence

import numpy
from scipy.special import stdtrit

SHORTEST_S = 60.0  # after the warm-up: a shorter training is not tested
_WARM_UP = 0.2  # of the time
_BLOCKS, _IN_A_BLOCK = 24, 4  # number of blocks, and the fewest samples that a block has on average
_CONFIDENCE = 0.999
_STILL = 0.5  # of the mean rate, by the last third
_LEAST_GIB, _LEAST_SHARE = 16 / 1024, 0.01


def growth(seconds: Sequence[float], gib: Sequence[float]) -> float | None:
    """Return the growth in GiB/s of N readings of memory, given their increasing times; None if no growth is shown."""
    times, values = numpy.asarray(seconds, float), numpy.asarray(gib, float)
    if not len(times):
        return None
    warm_up_end = times[0] + _WARM_UP * (times[-1] - times[0])
    times, values = times[times >= warm_up_end], values[times >= warm_up_end]
    if len(times) < _BLOCKS * _IN_A_BLOCK or times[-1] - times[0] < SHORTEST_S:
        return None
    block_s = (times[-1] - times[0]) / _BLOCKS
    blocks = numpy.minimum((times - times[0]) / block_s, _BLOCKS - 1).astype(int)
    filled_blocks, block_starts = numpy.unique(blocks, return_index=True)
    if len(filled_blocks) < _BLOCKS:  # sampling stopped for a while
        return None
    minima = numpy.minimum.reduceat(values, block_starts)
    rises = numpy.diff(minima) / block_s
    rate, error = float(rises.mean()), float(rises.std(ddof=1)) / math.sqrt(len(rises))
    is_shown = rate > float(stdtrit(len(rises) - 1, _CONFIDENCE)) * error
    is_large = rate * block_s * len(rises) > max(_LEAST_GIB, _LEAST_SHARE * minima[0])
    continues = rises[-(len(rises) // 3) :].mean() >= _STILL * rate
    return rate if is_shown and is_large and continues else None
