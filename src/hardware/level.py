"""A change of level: whether the steps of a run have become longer at some time, and have stayed longer.

The input is the time of a sample in equal, successive spans of the run. The logs are split in two so that the sum of the absolute
distances from the medians of both sides is least. The later side is slower if

1. both sides last three minutes or more, and have 15 spans or more: fewer have no interval at this confidence;
2. its median is longer by 8 % or more;
3. the interval of the difference of log medians excludes 0. It combines the intervals of both medians by adding the squares of
   their ends' distances from the medians (Newcombe 1998; Zou and Donner 2008). These intervals (records/intervals.py) count
   correlated successive spans as fewer ones. If too few are left for an interval with ends, the interval follows from the
   medians of five successive parts, by Student's t (batch means; Schmeiser 1982);
4. its last third is still longer by half of the difference or more: a slowdown that has passed is no new level;
5. the times lie nearer to the two medians than to a line (Tukey's resistant line), by 7 % at least: a drift is no new
   level, either.

A burst does not move medians, however large it is. `tests/hardware/test_level.py` has the false alarms in simulated runs.
"""

import heapq
import math
from typing import NamedTuple

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from ..records.intervals import median_interval

LASTS_S = 180.0  # of each side: a shared machine is slower for a minute at times
_FEWEST = 15  # spans of each side
_LEAST = math.log(1.08)
_CONFIDENCE = 0.9999  # of a median's interval: high, since the split is chosen among many
_PARTS = 5  # of a side: fewer make the interval wide, and of more, in a random walk, neighbours are correlated
_STILL = 0.5  # of the difference
_LARGEST_DISTANCE_RATIO = 0.93


class Slowdown(NamedTuple):
    """The first span of the later level, and the ratio of its median time to the one before, with an interval."""

    span: int
    ratio: float
    low: float
    high: float


def find_slowdown(times: ArrayLike, span_s: float) -> Slowdown | None:
    """Return the slower level that lasts to the end of N spans of `span_s` seconds, given the positive time of a sample in each
    span; None if none is shown."""
    values = numpy.log(numpy.asarray(times, float))
    split = _find_split(values, max(_FEWEST, math.ceil(LASTS_S / span_s)))
    if split is None:
        return None
    before, after = values[:split], values[split:]
    median_before, median_after = float(numpy.median(before)), float(numpy.median(after))
    difference = median_after - median_before
    has_recovered = numpy.median(after[-(len(after) // 3) :]) < median_before + _STILL * difference
    distance = abs(before - median_before).sum() + abs(after - median_after).sum()
    if difference < _LEAST or has_recovered or distance > _LARGEST_DISTANCE_RATIO * _distance_to_line(values):
        return None
    (before_low, before_high), (after_low, after_high) = _side_interval(before), _side_interval(after)
    low = difference - math.hypot(median_after - after_low, before_high - median_before)
    high = difference + math.hypot(after_high - median_after, median_before - before_low)
    return Slowdown(split, *(math.exp(end) for end in (difference, low, high))) if low > 0 else None


def _find_split(values: NDArray[numpy.float64], fewest: int) -> int | None:
    """Return the first span of the later side; None if two sides of `fewest` spans are not possible."""
    before, after = _median_distances(values), _median_distances(values[::-1])[::-1]
    splits = range(fewest, len(values) - fewest + 1)
    return min(splits, key=lambda split: before[split - 1] + after[split], default=None)


def _median_distances(values: NDArray[numpy.float64]) -> list[float]:
    """Return, for the first 1, 2, … N values, the sum of their distances from their median.

    The heaps hold each value twice: the N smallest, negated, and the N largest. A value beyond their border moves it.
    """
    smaller, larger, distance, distances = [math.inf], [math.inf], 0.0, list[float]()
    for value in values.tolist():
        distance += max(0.0, -smaller[0] - value, value - larger[0])
        heapq.heappush(larger, -heapq.heappushpop(smaller, -value))
        heapq.heappush(smaller, -heapq.heappushpop(larger, value))
        distances.append(distance)
    return distances


def _side_interval(values: NDArray[numpy.float64]) -> tuple[float, float]:
    """Return the interval of the median of one side."""
    low, high = median_interval(values, _CONFIDENCE)
    if math.isfinite(low):
        return low, high
    medians = [float(numpy.median(part)) for part in numpy.array_split(values, _PARTS)]
    reach = stdtrit(_PARTS - 1, (1 + _CONFIDENCE) / 2) * float(numpy.std(medians, ddof=1)) / math.sqrt(_PARTS)
    return float(numpy.median(values)) - reach, float(numpy.median(values)) + reach


def _distance_to_line(values: NDArray[numpy.float64]) -> float:
    """Return the sum of the distances of values from the line through the medians of their first and last third."""
    third, index = len(values) // 3, numpy.arange(len(values))
    slope = (numpy.median(values[-third:]) - numpy.median(values[:third])) / (len(values) - third)
    residuals = values - slope * index
    return float(abs(residuals - numpy.median(residuals)).sum())
