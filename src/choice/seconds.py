"""A time that is not known exactly: how two add up, and which of two is shorter."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

TEN_TO_NINETY = 2 * 1.2815515594457  # standard deviations between the 10th and the 90th percentile
CALLED_FROM = 0.75  # the probability from which on one of two times is called the shorter one


@dataclass(frozen=True)
class Interval:
    """Seconds: the middle, and the ends between which the truth lies in 80 of 100 cases."""

    low: float
    middle: float
    high: float

    def __add__(self, other: "Interval") -> "Interval":
        """Ends add to ends: most of the error is a device's own, which all of its kernels share."""
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __mul__(self, factor: float) -> "Interval":
        """The time of so many calls."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)


def exactly(seconds: float) -> Interval:
    """A time without uncertainty."""
    return Interval(seconds, seconds, seconds)


def total(intervals: Iterable[Interval]) -> Interval:
    """The time of all of them, one after the other."""
    return sum(intervals, start=exactly(0.0))


def probability_shorter(first: Interval, second: Interval) -> float:
    """That the first time is the shorter one, if both are lognormal and independent. From `CALLED_FROM` on it is called."""
    if min(first.low, second.low) <= 0:
        return 0.5 if first.middle == second.middle else float(first.middle < second.middle)
    spread = math.hypot(*(math.log(each.high / each.low) / TEN_TO_NINETY for each in (first, second)))
    distance = math.log(second.middle / first.middle)
    if spread == 0:
        return 0.5 if distance == 0 else float(distance > 0)
    return 0.5 * (1 + math.erf(distance / spread / math.sqrt(2)))
