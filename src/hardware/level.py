"""A change of level: whether the steps of a run have become longer at some time, and have stayed so.

The time of a sample is given for equal, successive spans of the run. Their logs are split in two where the absolute distances
from the medians of the two sides add up to the least. The later side is slower where

1. both sides last for three minutes, and hold 15 spans: fewer have no interval at this confidence;
2. the median of its times is longer by 8 % or more;
3. the interval of this difference, of logs, leaves out 0. It is made of the intervals of both medians
   (records/intervals.py), which count successive spans that are alike as fewer, by adding the squares of their distances
   from the medians (Newcombe 1998; Zou and Donner 2008). A median whose interval has no ends, because few spans are left,
   has that of the medians of five successive parts, by Student's t (batch means; Schmeiser 1982);
4. the last third of it is still longer by half of the difference or more: what has passed is no new level;
5. the times lie nearer to the two medians than to a line (Tukey's resistant line), by 7 % at least: a drift is no new
   level, either.

Medians do not follow a burst, however large it is. `tests/hardware/test_level.py` has the alarms in simulated
runs.
"""

import math
from typing import NamedTuple

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from ..records.intervals import median_interval

LASTS_S = 180.0  # of each side: a shared machine has moods of a minute
_FEWEST = 15  # spans of each side
_LEAST = math.log(1.08)
_CONFIDENCE = 0.9999  # of a median's interval: of all splits the one is taken that shows most
_PARTS = 5  # of a side: of fewer the interval is wide, and more are alike themselves in a random walk
_STILL = 0.5  # of the difference
_NEARER = 0.93


class Slowdown(NamedTuple):
    """The first span of the later level, and its times ÷ those before, with an interval."""

    span: int
    ratio: float
    low: float
    high: float


def slower_since(times: ArrayLike, span_s: float) -> Slowdown | None:
    """The slower level that has lasted to the end of N spans of so many seconds, given the positive time of a sample in
    each; None where none is shown."""
    values = numpy.log(numpy.asarray(times, float))
    split = _split(values, max(_FEWEST, math.ceil(LASTS_S / span_s)))
    if split is None:
        return None
    before, after = values[:split], values[split:]
    early, late = float(numpy.median(before)), float(numpy.median(after))
    difference = late - early
    has_passed = numpy.median(after[-(len(after) // 3) :]) < early + _STILL * difference
    distance = abs(before - early).sum() + abs(after - late).sum()
    if difference < _LEAST or has_passed or distance > _NEARER * _distance_to_line(values):
        return None
    (early_low, early_high), (late_low, late_high) = _interval(before), _interval(after)
    low = difference - math.hypot(late - late_low, early_high - early)
    high = difference + math.hypot(late_high - late, early - early_low)
    return Slowdown(split, *(math.exp(end) for end in (difference, low, high))) if low > 0 else None


def _split(values: NDArray[numpy.float64], fewest: int) -> int | None:
    """The first span of the later side; None with too few spans for two sides."""

    def distance(split: int) -> float:
        sides = values[:split], values[split:]
        # Any value between the two in the middle has the same distance.
        return sum(abs(side - numpy.partition(side, len(side) // 2)[len(side) // 2]).sum() for side in sides)

    return min(range(fewest, len(values) - fewest + 1), key=distance, default=None)


def _interval(values: NDArray[numpy.float64]) -> tuple[float, float]:
    """The interval of the median of one side."""
    low, high = median_interval(values, _CONFIDENCE)
    if math.isfinite(low):
        return low, high
    medians = [float(numpy.median(part)) for part in numpy.array_split(values, _PARTS)]
    reach = stdtrit(_PARTS - 1, (1 + _CONFIDENCE) / 2) * float(numpy.std(medians, ddof=1)) / math.sqrt(_PARTS)
    return float(numpy.median(values)) - reach, float(numpy.median(values)) + reach


def _distance_to_line(values: NDArray[numpy.float64]) -> float:
    """The sum of the distances of values from the line through the medians of their first and their last third."""
    third, at = len(values) // 3, numpy.arange(len(values))
    slope = (numpy.median(values[-third:]) - numpy.median(values[:third])) / (len(values) - third)
    flat = values - slope * at
    return float(abs(flat - numpy.median(flat)).sum())
